"""Writes docs/licences.md: the licences of what `pip install jshard` installs.

    python docs/licences.py

reads the metadata of the installed packages that pyproject.toml needs, and of those
that they need. Copyleft licences are found by name;
tests/project/test_packaging.py wants none.
"""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "licences.md"
COPYLEFT = re.compile(r"\b[AL]?GPL|General Public|\bMPL|Mozilla|\bEUPL|\bCDDL|\bSSPL")
_HEAD = """# Licences

jshard is under the Apache License 2.0. These are the packages that `pip install jshard`
installs, and their licences as their metadata names them; none is copyleft. Written by
`python docs/licences.py`.

The extras `cuda12`, `cuda13` and `plan` install NVIDIA's libraries, which are under
NVIDIA's own licences (CUDA Toolkit EULA, cuDNN SLA) and not free software.

| package | licence |
|---|---|
"""


def licences() -> dict[str, str]:
    """Returns the licence of each installed package that jshard needs, by name."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted, found = [Requirement(text) for text in project["dependencies"]], {}
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found[name] = _licence(name)
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            extras = {"", *requirement.extras}
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": x}) for x in extras):
                wanted.append(needed)
    return dict(sorted(found.items()))


def _licence(name: str) -> str:
    about = importlib.metadata.metadata(name)
    if expressions := about.get_all("License-Expression"):
        return expressions[0]
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or ()
        if text.startswith("License :: ") and text != "License :: OSI Approved"
    ]
    stated = "".join(about.get_all("License") or ()).strip()
    short = stated if stated and "\n" not in stated else ""
    return ", ".join(classifiers) or short or stated.partition("\n")[0] or "not stated"


def page() -> str:
    """Returns docs/licences.md."""
    return _HEAD + "".join(f"| {n} | {text} |\n" for n, text in licences().items())


if __name__ == "__main__":
    PAGE.write_text(page())

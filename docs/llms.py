"""Writes llms.txt, the list of pages for language models, from README and the pages.

    python docs/llms.py

writes it; `docs/lint.py` compares it with the pages.
"""

import re
import runpy
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FILE = REPOSITORY / "llms.txt"


def text() -> str:
    """The pages by folder, each with its title (llmstxt.org)."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    about = re.search(r"^Fully sharded.*?\n\n", readme, re.MULTILINE | re.DOTALL)
    assert about is not None
    lines, above = ["# jshard", "", f"> {' '.join(about[0].split())}"], None
    sources = runpy.run_path(str(REPOSITORY / "docs" / "lint.py"))["site_sources"]
    pages = [page for page in sources() if page.suffix == ".md"]
    for page in sorted(pages, key=lambda page: (len(page.parts), page)):
        name = page.relative_to(REPOSITORY)
        section = str(name.parent).replace(".", "The project")
        if section != above:
            lines += ["", f"## {section}", ""]
        title = re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert title is not None, page
        lines.append(f"- [{title[1]}]({name})")
        above = section
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")

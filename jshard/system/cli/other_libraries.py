"""Answers options of other libraries, in messages about unknown ones, with ours."""

import re
from collections.abc import Collection

from jshard.system.cli.option_names import TABLES


def counterpart(name: str, before: str, known: Collection[str] = ()) -> str:
    """Returns "; NAME of LIBRARY is KEY=VALUE" for an option of other libraries, or "".

    Args:
      name: What was given, perhaps with groups: "adam_beta1", "optimizer.lr".
      before: What stands before a key: "--config.", for example.
      known: The keys of the recipe. Where libraries differ, only answers that name one
        of these are returned; if none does, that is said. Empty if they are not known.
    """
    words = name.replace("-", "_").split(".")
    for first in range(len(words)):
        given = ".".join(words[first:])
        answers: dict[str, list[str]] = {}
        for library in TABLES:
            if answer := answers_of(library).get(given):
                answers.setdefault(answer, []).append(library)
        if answers:
            return _said(given, answers, before, known)
    return ""


def answers_of(library: str) -> dict[str, str]:
    """Returns what to write instead of each option of a library."""
    lines = (line.partition(" -> ") for line in TABLES[library].strip().splitlines())
    return {name: answer for names, _, answer in lines for name in names.split()}


def keys_of(answer: str) -> list[str]:
    """Returns the keys of a recipe that an answer names."""
    return re.findall(r"~([\w.]*\w)", answer)


def _said(
    given: str, answers: dict[str, list[str]], before: str, known: Collection[str]
) -> str:
    here = {
        answer: libraries
        for answer, libraries in answers.items()
        if not known
        or not (keys := keys_of(answer))
        or any(key in known for key in keys)
    }
    said = []
    for answer, libraries in (here or answers).items():
        what = f"is {answer}"
        if answer.startswith("none"):
            what = f"has no counterpart{answer.removeprefix('none')}"
        said.append(f"{given} of {' and '.join(libraries)} {what}")
    missing = "" if here else "; this recipe has no such key"
    return f"; {'; '.join(said)}{missing}".replace("~", before)

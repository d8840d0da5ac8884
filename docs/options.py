"""Writes the tables of other libraries' options into the page for their users.

    python docs/options.py

They are those that messages about unknown keys answer from.
"""

import re
from pathlib import Path

from jshard.system.cli.option_names import TABLES

PAGE = Path(__file__).parent / "coming_from" / "hugging_face_trainer.md"
LIBRARIES = ("Hugging Face's Trainer", "PEFT", "TRL")


def table(library: str) -> str:
    """A library's options and what is written here instead, as Markdown."""
    rows = ["| option | jshard |", "|---|---|"]
    for line in TABLES[library].strip().splitlines():
        names, _, answer = line.partition(" -> ")
        # A key's value is no sentence: it ends in a letter, or in the dots of a list.
        said = re.sub(r"~([\w.]*\w(?:=[\w.:,/]*[\w.])?)", r"`\1`", answer)
        rows.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {said} |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """The page with the tables between its comments of their names."""
    for library in LIBRARIES:
        start, end = f"<!-- options of {library} -->", "<!-- end of options -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n\n{table(library)}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()), encoding="utf-8")

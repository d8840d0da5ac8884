"""The code blocks of the pages: which are run, and why the others are not.

Above a block of commands or Python is a comment, which pages do not show:

    <!-- ci:run -->          commands, as in a checkout with its .venv
    <!-- ci:python -->       a page's blocks are one program, on eight CPU devices
    <!-- ci:plan -->         commands that need jshard[plan]; .ci/run runs them
    <!-- not run: WHY -->    for a reader's machine, data or patience

A page of which nothing can be run says `<!-- not run on this page: WHY -->` once.

    python docs/blocks.py PAGE ci:run

prints what of a page runs.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
HISTORY = ("log",)  # what was tried at its time
MADE = ("_build", "project", "notebooks")  # by conf.py; git ignores them
# The comments of programs that run, by language.
RUN = {"bash": ("ci:run", "ci:plan"), "python": ("ci:python",)}
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- (ci:\w+|not run: \S.*) -->\n\s*$")
_PAGE = re.compile(r"^<!-- not run on this page: \S.* -->$", re.MULTILINE)


class Block(NamedTuple):
    """A program on a page: its line, its language, the comment above it, its text."""

    line: int
    language: str
    comment: str
    text: str


def pages() -> list[Path]:
    """The pages whose blocks count."""
    return sorted(
        page
        for page in FOLDER.rglob("*.md")
        if page.relative_to(FOLDER).parts[0] not in (*HISTORY, *MADE)
    )


def blocks(text: str) -> list[Block]:
    """All programs of a page."""
    found = []
    for fence in _FENCE.finditer(text):
        indent, language, program = fence.groups()
        if language in RUN:
            before = _COMMENT.search(text[: fence.start()])
            comment = before[1] if before else ""
            if not comment and _PAGE.search(text):
                comment = "not run: on this page"
            program = re.sub(f"^{indent}", "", program, flags=re.MULTILINE)
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(line, language, comment, program))
    return found


def unmarked(text: str) -> list[str]:
    """A line for each program that neither runs nor says why not."""
    return [
        f"line {block.line}: {block.language}, {block.comment or 'without a comment'}"
        for block in blocks(text)
        if not block.comment.startswith("not run: ")
        and block.comment not in RUN[block.language]
    ]


def program(text: str, comment: str) -> str:
    """What of a page runs under one comment."""
    return "\n".join(block.text for block in blocks(text) if block.comment == comment)


if __name__ == "__main__":
    page, comment = sys.argv[1:]
    print(program(Path(page).read_text(), comment))

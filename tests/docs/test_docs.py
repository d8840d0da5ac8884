"""The pages' links lead somewhere, and the files that they name exist."""

import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(REPOSITORY / "docs" / "blocks.py"))
PAGES = [*sorted(REPOSITORY.glob("*.md")), REPOSITORY / "docs/log.md"]
PAGES += BLOCKS["pages"]()
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(
    r"(?<![\w/.-])((?:jshard|models|train|tests|benchmarks|docs|\.ci)/[\w/.-]*\w/?)"
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def broken_links(page: Path) -> list[str]:
    """What a page links to that is not there."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def missing_files(page: Path) -> list[str]:
    """Paths within the repository that a page names and that are not there."""
    return [
        name
        for name in NAMED.findall(page.read_text())
        if not (REPOSITORY / name).exists()
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    assert not broken_links(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    assert not missing_files(page)


def test_what_is_not_there_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page: one\n[a](#a-page-one) [b](#b) [c](c.md) jshard/no.py")
    assert broken_links(page) == ["#b", "c.md"]
    assert missing_files(page) == ["jshard/no.py"]

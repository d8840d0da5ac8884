"""Links and named files exist, tables have rows, and the site stays short."""

import json
import re
import runpy
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(REPOSITORY / "docs" / "blocks.py"))
CONF = runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))
MOST_WORDS = 49_870  # of the whole site
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/log/*.md")]
PAGES += BLOCKS["pages"]()
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(
    r"(?<![\w/.-])((?:jshard|models|train|tests|benchmarks|docs|\.ci)/[\w/.-]*\w/?)"
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

HEAD_OF_TABLE = re.compile(r"^ *\|.*\n *\|[ :|-]*-[ :|-]*\|[ ]*$\n?", re.MULTILINE)


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


def empty_tables(text: str) -> list[str]:
    """The first lines of tables without a row."""
    text = FENCE.sub("", text)
    return [
        head[0].splitlines()[0]
        for head in HEAD_OF_TABLE.finditer(text)
        if not text[head.end() :].lstrip(" ").startswith("|")
    ]


def site_sources() -> list[Path]:
    """The Markdown files and notebooks that Sphinx makes the site of."""
    off_site = [CONF["DOCS"] / name for name in CONF["NOT_ON_SITE"]]
    pages = [p for p in BLOCKS["pages"]() if not any(map(p.is_relative_to, off_site))]
    return [*pages, *CONF["BROUGHT"]]


def words(source: Path) -> int:
    """How many words a page has: what stands between spaces and has a letter or digit.

    So table cells, code and commands count, rules of tables and operators do not. What
    the API pages take from docstrings does not, either.
    """
    text = source.read_text()
    if source.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_links_resolve():
    assert {str(page): x for page in PAGES if (x := broken_links(page))} == {}


def test_files_that_are_named_exist():
    pages = [page for page in PAGES if not page.is_relative_to(CONF["DOCS"] / "log")]
    assert {str(page): x for page in pages if (x := missing_files(page))} == {}


def test_tables_have_rows():
    texts = {str(page): page.read_text() for page in PAGES}
    assert {page: x for page, text in texts.items() if (x := empty_tables(text))} == {}


def test_the_site_is_short_enough_to_read():
    counted = {source: words(source) for source in site_sources()}
    longest = sorted(counted, key=lambda source: -counted[source])[:5]
    assert min(counted.values()) > 0
    assert sum(counted.values()) <= MOST_WORDS, longest


@pytest.mark.parametrize(
    ("search", "page"),
    [
        ("W&B", "how_to/metrics"),
        ("wandb", "how_to/metrics"),
        ("freeze layers", "how_to/freeze"),
        ("learning rate", "how_to/freeze"),
        ("torch weights", "how_to/torch_weights"),
        ("PyTorch checkpoint", "how_to/torch_weights"),
        ("GAN", "how_to/two_optimizers"),
        ("contrastive loss", "how_to/contrastive"),
        ("CLIP", "how_to/contrastive"),
        ("profile", "how_to/profile"),
        ("nan", "how_to/nan"),
        ("OOM", "how_to/out_of_memory"),
        ("out of memory", "how_to/out_of_memory"),
        ("NamedSharding", "coming_from/jit"),
        ("pjit", "coming_from/jit"),
        ("pmap", "coming_from/pmap"),
        ("nnx.Dropout", "concepts/exactness"),
        ("GSPMD", "coming_from/jit"),
        ("nnx.Optimizer", "coming_from/nnx"),
        ("nnx.jit", "coming_from/nnx"),
        ("multi-node", "tutorials/many_hosts"),
        ("gs://", "how_to/buckets"),
        ("s3 bucket", "how_to/buckets"),
        ("Hugging Face dataset", "how_to/datasets"),
        ("learning rate for each layer", "how_to/freeze"),
        ("LoRA", "how_to/fine_tune"),
        ("QLoRA", "how_to/fine_tune"),
        ("multiple nodes", "tutorials/many_hosts"),
        ("spot", "how_to/preemption"),
        ("streaming", "how_to/datasets"),
        ("bf16", "memory"),
        ("fp8", "how_to/float8"),
        ("pipeline parallelism", "how_to/pipeline"),
        ("context parallelism", "how_to/long_sequences"),
        ("MoE", "how_to/experts"),
        ("DPO", "how_to/preferences"),
        ("lm_eval", "how_to/evaluate"),
        ("planner", "plan"),
        ("Python versions", "reference/versions"),
    ],
)
def test_what_people_search_for_is_in_a_heading(search, page):
    # The site's search weighs headings above all, and wants every word of a search.
    text = FENCE.sub("", (REPOSITORY / f"docs/{page}.md").read_text())
    headings = " ".join(re.findall(r"^#+ (.*)$", text, re.MULTILINE)).lower()
    assert set(re.findall(r"\w+", search.lower())) <= set(re.findall(r"\w+", headings))


def test_what_is_not_there_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a - `b` 1\n|---|\n")
    assert words(page) == 3
    assert empty_tables("| a |\n|---|\n| 1 |\n\n| b | c |\n|:--|--:|\n\nd") == [
        "| b | c |"
    ]
    assert empty_tables("  | a |\n  |---|\n\n| b |\n|---|") == ["  | a |", "| b |"]
    page.write_text("# A page: one\n[a](#a-page-one) [b](#b) [c](c.md) jshard/no.py")
    assert broken_links(page) == ["#b", "c.md"]
    assert missing_files(page) == ["jshard/no.py"]

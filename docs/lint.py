"""Checks the pages: links, files that they name, tables, headings, the site's length.

    python docs/lint.py

prints what is wrong, and exits with 1 if anything is. It needs Python alone.
"""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
BLOCKS = runpy.run_path(str(REPOSITORY / "docs" / "blocks.py"))
CONF = runpy.run_path(str(REPOSITORY / "docs" / "conf.py"))
MOST_WORDS = 60_555  # of the whole site
LINK = re.compile(r"\]\(([^()\s]+)\)")
NAMED = re.compile(
    r"(?<![\w/.-])((?:jshard|models|train|tests|benchmarks|docs|\.ci)/[\w/.-]*\w/?)"
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEAD_OF_TABLE = re.compile(r"^ *\|.*\n *\|[ :|-]*-[ :|-]*\|[ ]*$\n?", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# "18 a step", "3.1 MiB a device", "tokens/s a GPU": write "per". And what has a name.
UNCLEAR = re.compile(
    r"(?:\d|\d [KMG]i?B|\d (?:[mnu]?s|bits|bytes)|(?:tokens|examples|[KMGT]i?B|FLOP)/s"
    r"|nats|memory|object)\s+an?\s+"
    r"(?:step|device|GPU|host|process|token|layer|value|weight|kernel|second|byte|line)\b"
    r"(?!'| (?:receives|sends|of))"
    r"|\b(?:leaves?|arrives?) as an? (?:reduce-scatter|all-gather)\b"
)
# What people search for, by the page that is to be found. The site's search weighs
# headings above all, and wants every word of a search.
SEARCHES = {
    "coming_from/jit": ("NamedSharding", "pjit", "GSPMD"),
    "coming_from/nnx": ("nnx.Optimizer", "nnx.jit"),
    "coming_from/pmap": ("pmap",),
    "concepts/exactness": ("nnx.Dropout",),
    "how_to/buckets": ("gs://", "s3 bucket"),
    "how_to/colab": ("Colab", "Kaggle"),
    "how_to/contrastive": ("contrastive loss", "CLIP"),
    "how_to/contracts": ("contracts",),
    "how_to/datasets": ("Hugging Face dataset", "streaming"),
    "how_to/evaluate": ("lm_eval",),
    "how_to/experts": ("MoE",),
    "how_to/fine_tune": ("LoRA", "QLoRA"),
    "how_to/float8": ("fp8",),
    "how_to/freeze": ("freeze layers", "learning rate for each layer"),
    "how_to/long_sequences": ("context parallelism",),
    "how_to/metrics": ("W&B", "wandb"),
    "how_to/mup": ("muP",),
    "how_to/nan": ("nan",),
    "how_to/out_of_memory": ("OOM", "out of memory"),
    "how_to/pipeline": ("pipeline parallelism",),
    "how_to/preemption": ("spot",),
    "how_to/preferences": ("DPO",),
    "how_to/profile": ("profile",),
    "how_to/spikes": ("loss spikes",),
    "how_to/torch_weights": ("torch weights", "PyTorch checkpoint"),
    "how_to/trust": ("silent data corruption",),
    "how_to/two_optimizers": ("GAN",),
    "memory": ("bf16",),
    "plan": ("planner",),
    "reference/versions": ("Python versions",),
    "tutorials/many_hosts": ("multi-node", "multiple nodes"),
}


def headings(page: Path) -> list[str]:
    """The headings of a page."""
    return HEADING.findall(FENCE.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """The ids that GitHub gives to the headings of a page."""
    texts = (re.sub(r"[^\w -]", "", text.lower()) for text in headings(page))
    return {text.replace(" ", "-") for text in texts}


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
    named = NAMED.findall(page.read_text())
    return [name for name in named if not (REPOSITORY / name).exists()]


def empty_tables(text: str) -> list[str]:
    """The first lines of tables without a row."""
    text = FENCE.sub("", text)
    return [
        head[0].splitlines()[0]
        for head in HEAD_OF_TABLE.finditer(text)
        if not text[head.end() :].lstrip(" ").startswith("|")
    ]


def unclear(text: str) -> list[str]:
    """Figures that say "a" for "per", and collectives that leave or arrive."""
    return [found[0] for found in UNCLEAR.finditer(text)]


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


def site_sources() -> list[Path]:
    """The Markdown files and notebooks that Sphinx makes the site of."""
    off_site = [CONF["DOCS"] / name for name in CONF["NOT_ON_SITE"]]
    pages = [p for p in BLOCKS["pages"]() if not any(map(p.is_relative_to, off_site))]
    return [*pages, *CONF["BROUGHT"]]


def problems() -> Iterator[str]:
    """What is wrong, a line each."""
    off_site = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/log/*.md")]
    for page in (*off_site, *BLOCKS["pages"]()):
        name = page.relative_to(REPOSITORY)
        yield from (f"{name}: link to nothing: {x}" for x in broken_links(page))
        yield from (f"{name}: no such file: {x}" for x in missing_files(page))
        tables = empty_tables(page.read_text())
        yield from (f"{name}: table without a row: {x}" for x in tables)
        if not name.is_relative_to("docs/log") and name.name != "CHANGELOG.md":
            said = unclear(page.read_text())
            yield from (f"{name}: say per, or who does what: {x!r}" for x in said)
    for name, searches in SEARCHES.items():
        page = REPOSITORY / f"docs/{name}.md"
        found = set(re.findall(r"\w+", " ".join(headings(page)).lower()))
        for search in searches:
            if missing := set(re.findall(r"\w+", search.lower())) - found:
                yield f"docs/{name}.md: no heading has {missing} of {search!r}"
    llms = runpy.run_path(str(REPOSITORY / "docs" / "llms.py"))
    if llms["FILE"].read_text(encoding="utf-8") != llms["text"]():
        yield "llms.txt is not that of the pages: run python docs/llms.py"
    counted = {source: words(source) for source in site_sources()}
    if (number := sum(counted.values())) > MOST_WORDS:
        longest = sorted(counted, key=lambda source: -counted[source])[:5]
        names = ", ".join(str(page.relative_to(REPOSITORY)) for page in longest)
        yield f"the site has {number} words, {MOST_WORDS} are allowed; longest: {names}"


if __name__ == "__main__":
    print(*(found := [*problems()]), sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))

"""The linters of pages and modules find what they are for."""

import ast
import runpy
from pathlib import Path
from types import SimpleNamespace

REPOSITORY = Path(__file__).parents[2]
PAGES = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "docs/lint.py")))
MODULES = SimpleNamespace(**runpy.run_path(str(REPOSITORY / ".ci/style.py")))


def test_a_page_with_what_is_not_there_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a - `b` 1\n|---|\n")
    assert PAGES.words(page) == 3
    assert PAGES.empty_tables("| a |\n|---|\n| 1 |\n\n| b | c |\n|:--|--:|\n\nd") == [
        "| b | c |"
    ]
    page.write_text("# A page: one\n[a](#a-page-one) [b](#b) [c](c.md) jshard/no.py")
    assert PAGES.broken_links(page) == ["#b", "c.md"]
    assert PAGES.missing_files(page) == ["jshard/no.py"]


def test_a_for_per_is_named_and_other_articles_are_not():
    bad = "18 a step, 3.1 MiB a device, 5 tokens/s\na GPU, leaves as a reduce-scatter"
    bad += ", less memory a\nGPU, 2 nats a byte"
    assert len(PAGES.unclear(bad)) == 6
    good = "the 3.1 MiB a device receives; 18 per step; 8 a host's; in 2 s a run"
    assert not PAGES.unclear(good)


def test_long_signatures_missing_types_and_side_channels_are_named():
    bad = ast.parse(
        "def f(a, b, c, d, e, f, g, h): ...\nclass A:\n def m(self, x): ..."
    )
    assert list(MODULES.too_long(bad)) == ["1: f has 8 positional parameters"]
    assert [problem.split(" ")[1] for problem in MODULES.untyped(bad.body)] == [
        "f",
        "m",
    ]
    leaks = "def f():\n x = []\n def g(y):\n  x.append(y)\n  x[:] = [y]\n  return g"
    assert len(list(MODULES.side_channels(ast.parse(leaks)))) == 2
    ours = "def f():\n def g(y):\n  x = []\n  x.append(y)\n  return x\n return g"
    assert not list(MODULES.side_channels(ast.parse(ours)))

"""What the site's configuration says of its source, without Sphinx."""

import runpy
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONF = str(REPOSITORY / "docs/conf.py")


def test_pages_are_edited_in_the_repository_that_publishes_them(monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert "source_repository" not in runpy.run_path(CONF)["html_theme_options"]
    monkeypatch.setenv("GITHUB_REPOSITORY", "me/jshard")
    site = runpy.run_path(CONF)
    options = site["html_theme_options"]
    assert options["source_repository"] == "https://github.com/me/jshard/"
    assert (REPOSITORY / options["source_directory"] / "conf.py").exists()
    for page, suffix in (("project/SECURITY", ""), ("how_to/trainer", ".md")):
        context = {"page_source_suffix": ".md"}
        site["edit_where_written"](None, page, "page.html", context, None)
        assert context == {"page_source_suffix": suffix}


def test_the_footer_names_who_the_citation_names():
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"  - name: {runpy.run_path(CONF)['copyright']}\n" in citation


def test_a_page_that_a_docstring_names_is_a_link():
    lines = ["tensor: the heads (docs/how_to/tensor.md).", "docs/ alone"]
    runpy.run_path(CONF)["link_pages"](None, "function", "f", None, None, lines)
    assert lines == ["tensor: the heads (:doc:`/how_to/tensor`).", "docs/ alone"]


def test_notebooks_run_where_the_site_is_published(monkeypatch):
    monkeypatch.delenv("RUN_NOTEBOOKS", raising=False)
    assert runpy.run_path(CONF)["nb_execution_mode"] == "off"
    workflow = (REPOSITORY / ".github/workflows/publish.yml").read_text()
    assert 'RUN_NOTEBOOKS: "1"' in workflow
    monkeypatch.setenv("RUN_NOTEBOOKS", "1")
    assert runpy.run_path(CONF)["nb_execution_mode"] == "force"

"""The documentation site: `sphinx-build -W --keep-going -n docs site/html`.

Needs `pip install '.[docs]'` and no network. Pages are Markdown, as GitHub shows them:
links to files beside docs/ are relative, and become links within the site here.
"""

import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent

project = "jshard"
author = copyright = "The jshard developers"  # as in CITATION.cff
version = release = runpy.run_path(
    str(REPOSITORY / "jshard/system/compat/versions.py")
)["__version__"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
copybutton_exclude = ".linenos, .gp, .go"  # prompts and what was printed
copybutton_selector = "div:not(.highlight-none, .output) > div.highlight pre"
# Pages that the repository has and the site does not.
NOT_ON_SITE = ("architecture.md", "decisions", "licences.md", "log")
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints", *NOT_ON_SITE]
# JAX's wheels for CPUs suffice: nothing runs but imports and docstrings.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Blocks without a language are what terminals show.
highlight_language = "none"
myst_heading_anchors = 4  # the ids that GitHub gives to headings
# Notebooks are committed without outputs. RUN_NOTEBOOKS=1 runs them for the site, as
# publish.yml does: minutes, with '.[docs,plan,notebook]'.
nb_execution_mode = "force" if os.environ.get("RUN_NOTEBOOKS") else "off"
nb_execution_in_temp = nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds per cell
nb_output_stderr = "remove"  # the CUDA plugin's, about drivers that are not there

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True  # as they are written
napoleon_numpy_docstring = False
default_role = "code"  # docstrings have `names` as Markdown does

nitpick_ignore_regex = [
    # Types of other projects: an offline build has no index of them to link to.
    (r"py:.*", r"(?!jshard\.).*"),
    # Types within jshard that one public function returns for another.
    (r"py:class", r"jshard\.\w+\..*"),
]

html_theme = "furo"
html_title = f"jshard {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
# GitHub's machines, which publish the site, say whose repository this is. Elsewhere
# pages have no link to edit them.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    html_theme_options |= {
        "source_repository": f"https://github.com/{repository}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_copy_source = False

# Pages that belong at a repository's root, and notebooks, which are beside scripts.
PROJECT = ("SECURITY.md",)  # and CHANGELOG.md from the first release on
BROUGHT = {REPOSITORY / name: DOCS / "project" / name for name in PROJECT} | {
    path: DOCS / "notebooks" / path.name for path in REPOSITORY.glob("examples/*.ipynb")
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")


def bring(app: Any, config: Any) -> None:
    """Copies what the site takes from beside docs/; git ignores the copies."""
    for source, copy in BROUGHT.items():
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, copy)


def edit_where_written(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Leaves the link to edit a page out of copies, which git does not have."""
    if DOCS / page in [copy.with_suffix("") for copy in BROUGHT.values()]:
        context["page_source_suffix"] = ""


def relink(app: Any, docname: str, source: list[str]) -> None:
    """Makes links to files beside docs/ lead to their copies on the site."""
    page = Path(app.env.doc2path(docname))
    written = {copy: origin for origin, copy in BROUGHT.items()}.get(page, page)

    def link(match: re.Match[str]) -> str:
        picture, text, path, anchor = match.groups(default="")
        target = Path(os.path.normpath(written.parent / path))
        if not target.exists():
            return match[0]  # Sphinx says so
        if target == REPOSITORY / "README.md":
            target = DOCS / "index.md"
        off_site = any(target.is_relative_to(DOCS / name) for name in NOT_ON_SITE)
        # A page elsewhere in the repository, like examples/README.md.
        elsewhere = target.suffix == ".md" and not target.is_relative_to(DOCS)
        if target.is_dir() or off_site or (elsewhere and target not in BROUGHT):
            return text  # the site has no listings of folders
        shown = BROUGHT.get(target, target)
        return f"{picture}[{text}]({os.path.relpath(shown, page.parent)}{anchor})"

    source[0] = _LINK.sub(link, source[0])


def public_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Links the place of a class, which annotations say, to its public name."""
    import jshard

    name = node.get("reftarget", "").rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in dir(jshard):
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"jshard.{name}", node, contnode
    )


def mark_examples(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes the indented examples of a docstring code, as Markdown has them."""
    for i in range(len(lines) - 1, 1, -1):
        if lines[i].startswith("    ") and not lines[i - 1] and lines[i - 2][:1] > " ":
            lines[i:i] = [".. code-block:: default", ""]


def link_pages(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes a page that a docstring names, like docs/memory.md, a link to it."""
    lines[:] = [re.sub(r"\bdocs/([\w/]+)\.md\b", r":doc:`/\1`", x) for x in lines]


def setup(app: Any) -> None:
    """Connects the functions above; called by Sphinx."""
    app.connect("config-inited", bring)
    app.connect("source-read", relink)
    app.connect("html-page-context", edit_where_written)
    app.connect("missing-reference", public_name)
    app.connect("autodoc-process-docstring", mark_examples, priority=400)  # at first
    app.connect("autodoc-process-docstring", link_pages)

"""HTML pages that need no network: their styles and scripts are in them."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources


def document(
    heading: str,
    where: str,
    sections: Iterable[str],
    styles: Iterable[str],
    scripts: Iterable[str],
    package: str = "jshard.training.report",
) -> str:
    """A page.

    Args:
      heading: as text.
      where: as text, below it.
      sections: as HTML.
      styles: names of CSS files.
      scripts: names of JavaScript files.
      package: where the files are; those of ``jshard.training.report`` are found, too.
    """
    style = "".join(f"<style>\n{_read(name, package)}</style>" for name in styles)
    script = "".join(f"<script>\n{_read(name, package)}</script>" for name in scripts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title>\n{style}</head>\n<body>"
        f'<h1>{escape(heading)}</h1><p class="where">{escape(where)}</p>'
        f"\n{''.join(sections)}\n{script}</body></html>\n"
    )


def _read(name: str, package: str) -> str:
    file = resources.files(package).joinpath(name)
    if not file.is_file():
        file = resources.files("jshard.training.report").joinpath(name)
    return file.read_text(encoding="utf-8")


def section(heading: str, content: str) -> str:
    """A part of a page: its heading as text, its content as HTML."""
    return f"<h2>{escape(heading)}</h2>\n{content}\n"


def table(rows: Mapping[str, Sequence[str]], heading: Sequence[str] = ()) -> str:
    """A table of texts, with a first cell for each row and maybe a heading."""
    lines = [_row("th", heading)] if heading else []
    lines += [
        _row("td", cells, first=f"<th>{escape(name)}</th>")
        for name, cells in rows.items()
    ]
    kind = "table columns" if heading else "table"
    return f'<div class="{kind}"><table>{"".join(lines)}</table></div>'


def _row(tag: str, cells: Sequence[str], first: str = "") -> str:
    cells = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{first}{''.join(cells)}</tr>"

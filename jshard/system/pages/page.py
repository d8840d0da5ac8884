"""HTML pages that work offline: styles and scripts are embedded."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources


def document(
    heading: str,
    where: str,
    sections: Iterable[str],
    styles: Iterable[str],
    scripts: Iterable[str],
    package: str = "jshard.system.pages",
) -> str:
    """Returns a page: a plain heading and the line below it, and sections of HTML.

    Styles and scripts are names of files in `package` or in `jshard.system.pages`.
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
        file = resources.files("jshard.system.pages").joinpath(name)
    return file.read_text(encoding="utf-8")


def section(heading: str, content: str) -> str:
    """Returns a section with a plain-text heading and HTML content."""
    return f"<h2>{escape(heading)}</h2>\n{content}\n"


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Returns figures in large type, from pairs of a value and its name."""
    found = [
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for value, name in figures
    ]
    return cards(found, "tiles")


def cards(contents: Sequence[str], kind: str = "charts") -> str:
    """Returns HTML contents side by side, in rows of three and at the end of two."""
    count = len(contents)
    halves = 0 if count < 2 else {0: 0, 1: 4, 2: 2}[count % 3]
    widths = ["third"] * (count - halves) + ["half"] * halves
    found = "".join(
        f'<div class="{width}">{content}</div>'
        for width, content in zip(widths, contents, strict=True)
    )
    return f'<div class="cards {kind}">{found}</div>'


def folded(summary: str, content: str) -> str:
    """Returns HTML content below a line of plain text that unfolds it."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def pictures(found: Iterable[Mapping[str, str]]) -> str:
    """Returns pictures, each a "png" in base64, with plain-text captions."""
    figures = "".join(
        f'<figure><img alt="" src="data:image/png;base64,{escape(one["png"])}">'
        f"<figcaption>{escape(one['caption'])}</figcaption></figure>"
        for one in found
    )
    return f'<div class="pictures">{figures}</div>'


def bar(
    parts: Iterable[tuple[str, float, str]],
    full: float,
    marks: Sequence[str],
    limit: float | None = None,
) -> str:
    """Returns a bar of parts side by side.

    Args:
      parts: Of each its name, its size, and the size as text.
      full: The size of the whole bar.
      marks: CSS classes of their colors.
      limit: A size to mark in the bar.
    """
    blocks = "".join(
        f'<i class="{mark}" style="width:{100 * size / full:.3f}%" '
        f'title="{escape(name)}: {escape(text)}"></i>'
        for mark, (name, size, text) in zip(marks, parts, strict=True)
    )
    if limit is not None:
        blocks += f'<u style="left:{100 * limit / full:.3f}%"></u>'
    return f'<div class="bar">{blocks}</div>'


def note(text: str) -> str:
    """Returns plain text in small type."""
    return f'<p class="note">{escape(text)}</p>'


def table(
    rows: Iterable[Sequence[str]],
    heading: Sequence[str] = (),
    kind: str = "",
    marks: Sequence[str] = (),
) -> str:
    """Returns a table of plain text, or "" if there are no rows.

    Args:
      rows: Cells by row; the first cell is the row's name.
      heading: The cells of the heading, if it has one.
      kind: A CSS class.
      marks: CSS classes of colored marks before the names of the first rows.
    """
    lines = []
    for number, (name, *cells) in enumerate(rows):
        mark = f'<i class="swatch {marks[number]}"></i>' if marks[number:] else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f"<tr><th>{mark}{escape(name)}</th>{cells}</tr>")
    if not lines:
        return ""
    if heading:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
        lines.insert(0, f"<tr>{head}</tr>")
    kind = f"table {kind}".strip()
    return f'<div class="{kind}"><table>{"".join(lines)}</table></div>'

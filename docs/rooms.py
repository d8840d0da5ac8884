"""Draws docs/rooms.svg: the folders of jshard/ and the imports between them.

    python docs/rooms.py

A module of the design is a folder of jshard/, or of jshard/sharding/. Their order is
that of the list in docs/architecture.md, and each imports only those before it. The
files beside the folders are the commands and the public names, which come last. The
script reads files with ``ast`` and imports nothing itself. The picture leaves out an
arrow that follows from others.
"""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PICTURE = REPOSITORY / "docs" / "rooms.svg"
PAGE = REPOSITORY / "docs" / "architecture.md"
LIBRARY = "sharding"  # the folder whose own folders are modules, too
COMMANDS, NAMES = "the commands", "the public names"
LINKS = ("models", "recipes")  # to folders at the top level


class Import(NamedTuple):
    """One import: ``file`` in ``room`` imports ``module``, which is in ``of``."""

    file: str
    line: int
    room: str
    module: str
    of: str


def order(page: Path = PAGE) -> list[str]:
    """The modules in the order of the page's list, the lowest first."""
    listed = page.read_text().partition("\nFrom the bottom up")[2].partition("\n#")[0]
    found = re.findall(r"^( *)- \*\*`?([\w ]+)", listed, re.MULTILINE)
    names = [f"{LIBRARY}/{name}" if indent else name for indent, name in found]
    return [name for name in names if name != LIBRARY]


def modules(repository: Path = REPOSITORY) -> dict[str, Path]:
    """The files of jshard/ by the name of their module."""
    paths = sorted((repository / "jshard").rglob("*.py"))
    names = {path.relative_to(repository).with_suffix(""): path for path in paths}
    return {
        ".".join(name.parts).removesuffix(".__init__"): path
        for name, path in names.items()
        if name.parts[1] not in LINKS
    }


def imports(repository: Path = REPOSITORY) -> list[Import]:
    """Every import of one of jshard's modules by another, sorted by file."""
    found = modules(repository)
    return [
        Import(
            str(path.relative_to(repository)),
            line,
            room(path.relative_to(repository)),
            target,
            room(found[target].relative_to(repository)),
        )
        for name, path in found.items()
        for line, target in _imported(ast.parse(path.read_text()), found)
        if target != name
    ]


def _imported(tree: ast.Module, modules: dict[str, Path]) -> list[tuple[int, str]]:
    """Lines and jshard's modules of all imports, also those within functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(
                    f"line {node.lineno}: write imports from jshard in full"
                )
            for alias in node.names:  # of a module, or of a name in one
                name = f"{node.module}.{alias.name}"
                found.append((node.lineno, name if name in modules else node.module))
    return [(line, name) for line, name in found if name in modules]


def room(file: Path) -> str:
    """The module of the design that a file, relative to the repository, is in."""
    _, *folders, name = file.parts
    if folders:
        library = folders[0] == LIBRARY and len(folders) > 1
        return "/".join(folders[: 1 + library])
    source = (REPOSITORY / file).read_text() if (REPOSITORY / file).exists() else ""
    return COMMANDS if name == "__main__.py" or "def main(" in source else NAMES


def against_the_order(found: list[Import]) -> list[str]:
    """A line for each import of what comes later in the list of the page."""
    ranks = {name: rank for rank, name in enumerate(order())}
    return [
        f"{i.file}:{i.line} imports {i.module}, but {i.of} comes after {i.room} in the "
        "list of docs/architecture.md"
        for i in found
        if ranks[i.room] < ranks[i.of]
    ]


def circles(found: list[Import]) -> list[str]:
    """A line for each two folders within one folder that import each other."""
    pairs: dict[tuple[str, str], str] = {}
    for i in found:
        one = Path(i.file).parent.parts
        other = Path(*i.module.split(".")).parts
        other = other if (REPOSITORY / Path(*other)).is_dir() else other[:-1]
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        if same < min(len(one), len(other)):
            ends = "/".join(one[: same + 1]), "/".join(other[: same + 1])
            pairs.setdefault(ends, f"{i.file}:{i.line} imports {i.module}")
    return [
        f"{line}, and {pairs[other, one]}"
        for (one, other), line in pairs.items()
        if one < other and (other, one) in pairs
    ]


def direct(found: list[Import]) -> dict[str, set[str]]:
    """The modules that each imports, in the order of the list."""
    return {name: {i.of for i in found if i.room == name} - {name} for name in order()}


def arrows(found: list[Import]) -> list[tuple[str, str]]:
    """Pairs of modules with an import, but those that others lead to."""
    ways, reached = direct(found), dict[str, set[str]]()
    for name, targets in ways.items():
        reached[name] = targets.union(*(reached.get(to, ()) for to in targets))
    return [
        (name, to)
        for name, targets in ways.items()
        for to in order()
        if to in targets and not any(to in reached[via] for via in targets)
    ]


def levels(found: list[Import]) -> dict[str, int]:
    """How many modules are below each, on the longest way down."""
    level: dict[str, int] = {}
    for name, targets in direct(found).items():
        level[name] = 1 + max((level[to] for to in targets), default=-1)
    return level


WIDTH, BOX, HEIGHT, PITCH, MARGIN = 860, 350, 36, 56, 12
FONT = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"
BESIDE = {COMMANDS: "parse, build, run", NAMES: "what a program imports"}


def subject(name: str) -> str:
    """What a module is for: the first sentence of its ``__init__.py``."""
    if name in BESIDE:
        return BESIDE[name]
    source = (REPOSITORY / "jshard" / name / "__init__.py").read_text()
    text = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]
    return " ".join(text.split()).partition(". ")[0].replace("``", "").rstrip(".")


def places(found: list[Import]) -> dict[str, tuple[int, int]]:
    """The middle of each box and the row of it, counted from the bottom."""
    rows = levels(found)
    number = Counter(rows.values())
    seen: Counter[int] = Counter()
    at = {}
    for name, row in rows.items():
        seen[row] += 1
        at[name] = WIDTH * (2 * seen[row] - 1) // (2 * number[row]), row
    return at


def _wide(number: int) -> int:
    """The width of each of so many boxes in a row."""
    return min(BOX, WIDTH // number - MARGIN)


def _way(
    source: tuple[int, int], target: tuple[int, int], top: int, number: Counter[int]
) -> str:
    """The path of an arrow: straight to the next row, around the rows between."""
    (x, row), (to, below) = source, target
    y, end = (top - row) * PITCH, (top - below) * PITCH
    if row - below == 1:
        return f"M{x} {y + HEIGHT} {to} {end - 2}"
    side = 1 if to >= WIDTH // 2 else -1
    x, to = x + side * _wide(number[row]) // 2, to + side * _wide(number[below]) // 2
    y, end = y + HEIGHT // 2, end + HEIGHT // 2
    out = side * (16 + 5 * (row - below))
    return f"M{x} {y} C{x + out} {y} {to + out} {end} {to + 2 * side} {end}"


def svg(found: list[Import]) -> str:
    """The picture."""
    at = places(found)
    top = max(row for _, row in at.values())
    width, height = WIDTH + 2 * MARGIN, top * PITCH + HEIGHT + 2 * MARGIN
    number = Counter(row for _, row in at.values())
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='{-MARGIN} {-MARGIN} {width} {height}' role='img' {FONT}>",
        "<title>The modules of jshard; an arrow is an import</title>",
        "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        "markerHeight='7' orient='auto'><path d='M0 0 8 4 0 8z' fill='#667'/></marker>"
        "</defs>",
        f"<rect x='{-MARGIN}' y='{-MARGIN}' width='{width}' height='{height}' "
        "fill='#fff'/>",
    ]
    for source, target in arrows(found):
        way = _way(at[source], at[target], top, number)
        lines.append(
            f"<path d='{way}' stroke='#667' stroke-width='1.4' fill='none' "
            "marker-end='url(#head)'/>"
        )
    for name, (x, row) in at.items():
        wide, y = _wide(number[row]), (top - row) * PITCH
        fill = "#fdecc8" if name.startswith(LIBRARY) else "#eef3fb"
        title = name if name in BESIDE else f"{name}/"
        lines += [
            f"<rect x='{x - wide // 2}' y='{y}' width='{wide}' height='{HEIGHT}' "
            f"rx='5' fill='{fill}' stroke='#89a'/>",
            f"<text x='{x}' y='{y + 15}' text-anchor='middle' font-size='13' "
            f"font-weight='bold' fill='#223'>{title}</text>",
            f"<text x='{x}' y='{y + 29}' text-anchor='middle' font-size='11' "
            f"fill='#445'>{subject(name)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(imports()))

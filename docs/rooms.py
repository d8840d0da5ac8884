"""Draws docs/rooms.svg: the modules of jshard/ and the imports between them.

    python docs/rooms.py

reads the imports of every file with ``ast`` and imports nothing itself. A room, one
module of the design, is a folder or some files of jshard/; imports go down. The
picture leaves out an arrow that follows from two others.
"""

import ast
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
PICTURE = REPOSITORY / "docs" / "rooms.svg"


class Room(NamedTuple):
    """A box of the picture.

    Attributes:
      floor: its layer; 0 is the ground. A module imports from lower layers only.
      left: left edge of the box, in pixels; so ``right``.
      what: what the module is for.
      files: the files and folders that it consists of, in jshard/; none for the folder
        of its name. A file counts to the module that names it, not to its folder's.
      ordered: whether each of these imports only those that are named before it.
    """

    floor: int
    left: int
    right: int
    what: str
    files: str = ""
    ordered: bool = False


ROOMS = {
    "commands": Room(
        9, 0, 510, "parse, build, run: python -m jshard.NAME",
        "train launch inspect export tokenize generate perplexity __main__ "
        "evaluate/__main__ report/__main__",
    ),
    "surface": Room(
        9, 525, 720, "the public names", "__init__ functional linen testing"
    ),
    "plan": Room(9, 735, 860, "for absent GPUs"),
    "training": Room(
        8, 0, 860, "what a run adds to the library, from its config to the Trainer",
        "config data recipe report run fit evaluate training trained", ordered=True,
    ),
    "checkpoint": Room(
        7, 0, 230, "save, verify, restore, convert", "checkpoint hub", ordered=True
    ),
    "generation": Room(7, 260, 450, "decoding, sampling"),
    "start-up note": Room(
        7, 480, 700, "a step's counts, in words", "plan/start_up plan/state_note"
    ),
    "fsdp": Room(
        6, 260, 706, "mesh and policy to states and jitted steps", "fsdp pipe"
    ),
    "nn": Room(5, 0, 450, "losses, attention, dropout"),
    "optim": Room(5, 470, 620, "the update of the shards"),
    "unit": Room(
        4, 120, 450, "gather, run, drop", "unit float8 pipe/call parallel/partial_sums"
    ),
    "cpu": Room(4, 634, 706, "order, pace"),
    "collectives": Room(3, 120, 450, "gather, scatter, reduce"),
    "layout": Room(
        2, 120, 560, "where every array lives: specs, memory kinds, values",
        "layout four_bit parallel/splits pipe/stages pipe/schedule",
    ),
    "distributed": Room(3, 720, 860, "jobs, heartbeat"),
    "cli": Room(2, 720, 860, "one-line errors"),
    "compat": Room(1, 120, 860, "private and versioned calls of JAX and Orbax"),
    "parallel": Room(1, 0, 100, "its axes"),
    "ground": Room(
        0, 0, 860, "mesh axes, all knobs, TrainState",
        "errors cli/formatting cli/knob compat/versions "
        "fsdp/callers_mesh fsdp/mesh fsdp/policy fsdp/precision fsdp/scopes fsdp/state "
        "pipe/in_stages",
    ),
}  # fmt: skip


class Import(NamedTuple):
    """One import: ``file`` in ``room`` imports ``module``, which is in ``of``."""

    file: str
    line: int
    room: str
    module: str
    of: str


def imports(repository: Path = REPOSITORY) -> list[Import]:
    """Every import of one of jshard's modules by another, sorted by file."""
    files = {
        ".".join(path.relative_to(repository).with_suffix("").parts): path
        for path in sorted((repository / "jshard").rglob("*.py"))
    }
    modules = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return [
        Import(
            str(path.relative_to(repository)), line, _room(name), target, _room(target)
        )
        for name, path in modules.items()
        for line, target in _imported(ast.parse(path.read_text()), modules)
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


def _room(module: str) -> str:
    """The room that names the module's file, or its folder, in jshard/."""
    return _place(module)[0]


def _place(module: str) -> tuple[str, int]:
    """The module's room, and which of the room's files and folders it is in."""
    _, *names = module.split(".")
    for end in (len(names), 1):
        path = "/".join(names[:end]) or "__init__"
        for name, room in ROOMS.items():
            if path in (files := room.files.split() or [name]):
                return name, files.index(path)
    raise KeyError(f"{module} is in no module of docs/rooms.py")


def _goes_back(one: Import) -> bool:
    """Whether an import within an ordered room is of what is named after it."""
    module = ".".join(Path(one.file).with_suffix("").parts).removesuffix(".__init__")
    own, other = _place(module), _place(one.module)
    return own[0] == other[0] and ROOMS[own[0]].ordered and own[1] < other[1]


def against_the_arrows(found: list[Import]) -> list[str]:
    """A line for each import that does not go down, or goes back within a room."""
    return [
        f"{i.file}:{i.line} imports {i.module}, which {i.room} names after it"
        for i in found
        if _goes_back(i)
    ] + [
        f"{i.file}:{i.line} imports {i.module}, but {i.room} (layer "
        f"{ROOMS[i.room].floor}) may import only from lower layers, and {i.of} is in "
        f"layer {ROOMS[i.of].floor}"
        for i in found
        if i.room != i.of and ROOMS[i.of].floor >= ROOMS[i.room].floor
    ]


def arrows(found: list[Import]) -> list[tuple[str, str]]:
    """Pairs of rooms with an import, but those that others lead to."""
    direct = {room: {i.of for i in found if i.room == room} - {room} for room in ROOMS}
    reached: dict[str, set[str]] = {}
    for room in sorted(ROOMS, key=lambda name: ROOMS[name].floor):
        reached[room] = direct[room].union(*(reached.get(r, ()) for r in direct[room]))
    return [
        (room, to)
        for room in ROOMS
        for to in ROOMS
        if to in direct[room] and not any(to in reached[via] for via in direct[room])
    ]


WIDTH, HEIGHT, PITCH, MARGIN = 860, 44, 68, 12
FONT = "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'"
TOP = max(room.floor for room in ROOMS.values())


def _top(name: str) -> int:
    return (TOP - ROOMS[name].floor) * PITCH


def _ends(source: Room, target: Room) -> tuple[int, int]:
    """Where an arrow leaves and arrives: straight down where the boxes overlap."""
    left, right = max(source.left, target.left), min(source.right, target.right)
    if left < right:
        return (left + right) // 2, (left + right) // 2
    if source.right <= target.left:
        return source.right - 12, target.left + 24
    return source.left + 24, target.right - 24


def _shown(path: str) -> str:
    return f"{path}/" if (REPOSITORY / "jshard" / path).is_dir() else path


def svg(found: list[Import]) -> str:
    """The picture."""
    width, height = WIDTH + 2 * MARGIN, TOP * PITCH + HEIGHT + 2 * MARGIN
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
        x, to = _ends(ROOMS[source], ROOMS[target])
        lines.append(
            f"<path d='M{x} {_top(source) + HEIGHT} {to} {_top(target) - 2}' "
            "stroke='#667' stroke-width='1.4' fill='none' marker-end='url(#head)'/>"
        )
    for name, room in ROOMS.items():
        title = ", ".join(map(_shown, room.files.split() or [name]))
        fill = "#fdecc8" if name == "unit" else "#eef3fb"
        middle, y = (room.left + room.right) // 2, _top(name)
        lines += [
            f"<rect x='{room.left}' y='{y}' width='{room.right - room.left}' "
            f"height='{HEIGHT}' rx='5' fill='{fill}' stroke='#89a'/>",
            f"<text x='{middle}' y='{y + 18}' text-anchor='middle' font-size='13' "
            f"font-weight='bold' fill='#223'>{title}</text>",
            f"<text x='{middle}' y='{y + 35}' text-anchor='middle' font-size='12' "
            f"fill='#445'>{room.what}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(svg(imports()))

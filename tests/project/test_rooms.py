"""The modules of jshard/: imports go down, sizes are held, the picture is current."""

import ast
import runpy
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "rooms.py"
ROOMS = runpy.run_path(str(SCRIPT))
PACKAGE = SCRIPT.parents[1] / "jshard"

# What a reader takes in. A module may become smaller on its own; to let it grow is a
# decision, made here. Lines of Python, blank ones and comments included.
MOST_LINES = {
    "commands": 1311,
    "surface": 683,
    "plan": 5297,
    "training": 17002,
    "checkpoint": 7911,
    "generation": 1218,
    "start-up note": 444,
    "fsdp": 2837,
    "nn": 2090,
    "optim": 1805,
    "unit": 3644,
    "cpu": 423,
    "collectives": 711,
    "layout": 2519,
    "distributed": 1959,
    "cli": 1233,
    "compat": 1072,
    "parallel": 564,
    "ground": 1779,
}
MOST_CLASSES_IN_UNIT = 6
MOST_FLOORS = 10
LONGEST_FILE = 350
MOST_FILES_IN_A_FOLDER = 12
# What DESIGN and every reader calls them.
NAMED_AS_THEIR_FOLDER = {"sharding/step/fsdp.py", "sharding/units/unit.py"}


@pytest.fixture(scope="module")
def found():
    return ROOMS["imports"]()


def test_no_import_runs_against_the_arrows(found):
    assert len(found) > 300
    assert not ROOMS["against_the_arrows"](found)


def test_every_room_is_there():
    for name, room in ROOMS["ROOMS"].items():
        for path in room.files.split() or [name]:
            file = SCRIPT.parents[1] / "jshard" / path
            assert file.is_dir() or file.with_suffix(".py").is_file(), path


def test_the_picture_is_what_the_script_draws_now(found):
    drawn = ROOMS["svg"](found)
    assert ROOMS["PICTURE"].read_text() == drawn, "run python docs/rooms.py"


@pytest.mark.parametrize(
    ("file", "line", "module", "of"),
    [
        ("sharding/settings/state.py", "import jshard.training", "jshard.training", "training"),
        ("sharding/step/fsdp.py", "import jshard.plan", "jshard.plan", "plan"),
        ("sharding/settings/policy.py", "from jshard.sharding.units import unit", "jshard.sharding.units.unit", "unit"),
        ("sharding/update/ema.py", "from jshard.nn import loss", "jshard.sharding.settings.loss", "nn"),
        ("sharding/cpu/order.py", "def f():\n    from jshard import Mean", "jshard", "surface"),
    ],
)  # fmt: skip
def test_an_import_that_goes_up_is_named(tmp_path, file, line, module, of):
    names = (
        "__init__.py",
        "plan/__init__.py",
        "training/__init__.py",
        "sharding/units/unit.py",
    )
    for name in (*names, "sharding/settings/loss.py", file):
        (tmp_path / "jshard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jshard" / name).write_text("")
    (tmp_path / "jshard" / file).write_text(f"import json\n{line}\n")
    (message,) = ROOMS["against_the_arrows"](ROOMS["imports"](tmp_path))
    number = 1 + len(line.splitlines())
    assert message.startswith(f"jshard/{file}:{number} imports {module}, but ")
    assert f"and {of} is in layer" in message


def test_an_import_of_what_its_room_names_later_is_named(tmp_path):
    for name in ("__init__.py", "training/__init__.py", "run/saving.py"):
        (tmp_path / "jshard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jshard" / name).write_text("")
    (tmp_path / "jshard/training/run/saving.py").write_text("import jshard.training\n")
    (tmp_path / "jshard/training/__init__.py").write_text(
        "import jshard.training.run.saving\n"
    )
    (message,) = ROOMS["against_the_arrows"](ROOMS["imports"](tmp_path))
    assert message == (
        "jshard/training/run/saving.py:1 imports jshard.training, which training names after it"
    )


def test_a_new_file_needs_a_room(tmp_path):
    (tmp_path / "jshard").mkdir()
    (tmp_path / "jshard" / "utils.py").write_text("import jshard\n")
    (tmp_path / "jshard" / "__init__.py").write_text("")
    with pytest.raises(KeyError, match=r"jshard\.utils is in no module"):
        ROOMS["imports"](tmp_path)


def lines_of_files() -> dict[str, int]:
    return {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }


def lines_of_rooms(files: dict[str, int]) -> Counter[str]:
    lines: Counter[str] = Counter()
    for file, number in files.items():
        module = ".".join(("jshard", *Path(file).with_suffix("").parts))
        lines[ROOMS["_room"](module.removesuffix(".__init__"))] += number
    return lines


def test_no_room_has_more_lines_than_it_is_given():
    lines = lines_of_rooms(lines_of_files())
    assert {*lines} == {*ROOMS["ROOMS"]} == {*MOST_LINES}
    assert {room: n for room, n in lines.items() if n > MOST_LINES[room]} == {}


def test_no_file_is_too_long():
    files = lines_of_files()
    assert {file: n for file, n in files.items() if n > LONGEST_FILE} == {}


def test_a_folder_has_few_files():
    folders = Counter(str(Path(file).parent) for file in lines_of_files())
    most = MOST_FILES_IN_A_FOLDER
    assert {name: n for name, n in folders.items() if n > most} == {}


def test_no_two_files_have_one_name_and_none_its_folders():
    files = [Path(file) for file in lines_of_files()]
    names = Counter(x.name for x in files if not x.name.startswith("__"))
    assert {name for name, n in names.items() if n > 1} == set()
    stutters = {str(x) for x in files if x.stem == x.parent.name}
    assert stutters == NAMED_AS_THEIR_FOLDER


def test_the_algorithm_has_few_classes():
    classes = [
        node.name
        for path in (PACKAGE / "unit").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert "Stack" in classes
    assert len(classes) <= MOST_CLASSES_IN_UNIT, classes


def test_there_are_at_most_ten_floors():
    assert len({room.floor for room in ROOMS["ROOMS"].values()}) <= MOST_FLOORS

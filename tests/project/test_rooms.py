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
    "system": 6148,
    "sharding": 1,
    "sharding/settings": 1973,
    "sharding/layout": 2618,
    "sharding/axes": 763,
    "sharding/cpu": 476,
    "sharding/collectives": 911,
    "sharding/float8": 888,
    "sharding/update": 2476,
    "sharding/units": 2082,
    "sharding/pipeline": 1029,
    "sharding/step": 3495,
    "nn": 1467,
    "storage": 8363,
    "data": 6875,
    "recipe": 2991,
    "plan": 11182,
    "inference": 2524,
    "training": 6815,
    "the commands": 1374,
    "the public names": 719,
}
MOST_CLASSES_IN_UNITS = 8
MOST_LEVELS = 15
LONGEST_FILE = 350
MOST_FILES_IN_A_FOLDER = 12
# What every reader calls it.
NAMED_AS_THEIR_FOLDER = {"sharding/step/step.py"}


@pytest.fixture(scope="module")
def found():
    return ROOMS["imports"]()


def test_each_module_imports_only_those_before_it_in_the_list(found):
    assert len(found) > 2000
    assert not ROOMS["against_the_order"](found)


def test_no_two_folders_import_each_other(found):
    assert not ROOMS["circles"](found)


def test_the_list_names_every_folder_and_nothing_else(found):
    assert {i.room for i in found} - {"sharding"} == {*ROOMS["order"]()}


def test_the_picture_is_what_the_script_draws_now(found):
    drawn = ROOMS["svg"](found)
    assert ROOMS["PICTURE"].read_text() == drawn, "run python docs/rooms.py"


@pytest.mark.parametrize(
    ("file", "line", "module", "of"),
    [
        ("sharding/settings/state.py", "import jshard.plan", "jshard.plan", "plan"),
        ("sharding/step/fsdp.py", "import jshard.nn", "jshard.nn", "nn"),
        ("system/errors.py", "from jshard.data import text", "jshard.data", "data"),
        ("nn/lora.py", "def f():\n    from jshard import UserError", "jshard",
         "the public names"),
    ],
)  # fmt: skip
def test_an_import_that_goes_up_is_named(tmp_path, file, line, module, of):
    names = ("__init__.py", "plan/__init__.py", "nn/__init__.py", "data/__init__.py")
    for name in (*names, file):
        (tmp_path / "jshard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jshard" / name).write_text("")
    (tmp_path / "jshard" / file).write_text(f"import json\n{line}\n")
    (message,) = ROOMS["against_the_order"](ROOMS["imports"](tmp_path))
    number = 1 + len(line.splitlines())
    assert message.startswith(f"jshard/{file}:{number} imports {module}, but {of} ")


def test_two_folders_that_import_each_other_are_named(tmp_path):
    files = {
        "data/text/one.py": "import jshard.data.images.two\n",
        "data/images/two.py": "import jshard.data.text.one\n",
        "data/both.py": "import jshard.data.images.two\n",
    }
    for name, text in files.items():
        (tmp_path / "jshard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jshard" / name).write_text(text)
    (line,) = ROOMS["circles"](ROOMS["imports"](tmp_path))
    assert "images/two.py:1 imports jshard.data.text.one" in line
    assert "text/one.py:1 imports jshard.data.images.two" in line


def lines_of_files() -> dict[str, int]:
    return {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }


def test_no_module_has_more_lines_than_it_is_given():
    lines: Counter[str] = Counter()
    for file, number in lines_of_files().items():
        lines[ROOMS["room"](Path("jshard") / file)] += number
    assert {*lines} == {*MOST_LINES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES[name]} == {}


def test_no_file_is_too_long():
    files = lines_of_files()
    assert {file: n for file, n in files.items() if n > LONGEST_FILE} == {}


def test_a_folder_has_few_files():
    folders = Counter(str(Path(file).parent) for file in lines_of_files())
    del folders["."]  # the commands and the public names
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
        for path in (PACKAGE / "sharding/units").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert "Stack" in classes
    assert len(classes) <= MOST_CLASSES_IN_UNITS, classes


def test_there_are_few_levels(found):
    assert max(ROOMS["levels"](found).values()) < MOST_LEVELS

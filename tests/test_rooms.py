"""The rooms of jshard/: imports go down, and docs/rooms.svg shows today's."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docs" / "rooms.py"
ROOMS = runpy.run_path(str(SCRIPT))


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
        ("fsdp/state.py", "import jshard.training", "jshard.training", "training"),
        ("fsdp/fsdp.py", "import jshard.plan", "jshard.plan", "plan"),
        ("fsdp/policy.py", "from jshard.unit import unit", "jshard.unit.unit", "unit"),
        ("optim/ema.py", "from jshard.nn import loss", "jshard.nn.loss", "nn"),
        ("cpu/order.py", "def f():\n    from jshard import Mean", "jshard", "surface"),
    ],
)  # fmt: skip
def test_an_import_that_goes_up_is_named(tmp_path, file, line, module, of):
    names = ("__init__.py", "plan/__init__.py", "training/__init__.py", "unit/unit.py")
    for name in (*names, "nn/loss.py", file):
        (tmp_path / "jshard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "jshard" / name).write_text("")
    (tmp_path / "jshard" / file).write_text(f"import json\n{line}\n")
    (message,) = ROOMS["against_the_arrows"](ROOMS["imports"](tmp_path))
    number = 1 + len(line.splitlines())
    assert message.startswith(f"jshard/{file}:{number} imports {module}, but ")
    assert f"and {of} is on floor" in message


def test_a_new_file_needs_a_room(tmp_path):
    (tmp_path / "jshard").mkdir()
    (tmp_path / "jshard" / "utils.py").write_text("import jshard\n")
    (tmp_path / "jshard" / "__init__.py").write_text("")
    with pytest.raises(KeyError, match=r"jshard\.utils is in no room"):
        ROOMS["imports"](tmp_path)

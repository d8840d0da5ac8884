"""Names, samples, configs and metadata of strangers do not control the terminal."""

import ast
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import jshard
from checkpoints import at_step, make_fsdp, trained
from jshard import inspect
from jshard.inference.trained import generate_command
from jshard.storage.checkpoint import manifest, metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.system.cli import command
from jshard.system.cli.terminal import _outputs, is_terminal, show
from jshard.system.errors import Preempted, RunFailed
from jshard.system.formatting import one_line, printable
from jshard.training.run.progress import ProgressDisplay

PACKAGE = Path(jshard.__file__).parent
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\ud800\x7f"
# What is no letter, and yet of a text: of Persian, of emoji, of French, of Chinese.
PLAIN = "a\u200cb 👩\u200d🔬 1\u202f000\xa0€\u3000。\n\tend"


def is_harmless(text: str) -> bool:
    return set(text).isdisjoint("\x1b\x07\x9b\u202e\r\ud800\x7f")


def test_text_stays_as_it_is_and_controls_are_shown():
    assert printable(PLAIN) == PLAIN
    escaped = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\ud800\x7f"
    assert printable(HOSTILE) == escaped
    assert one_line(f"a\nb\tc{HOSTILE}") == rf"a b\tc{escaped}"


def test_nothing_but_one_function_prints():
    """Others could print what a stranger wrote; pipes of ours are no terminals."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "print(" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                to = [ast.unparse(k.value) for k in node.keywords if k.arg == "file"]
                if not to or to[0].startswith("sys."):
                    found.append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert found == []


def test_what_is_shown(capsys):
    show(HOSTILE)
    show(HOSTILE, error=True, end="")
    ProgressDisplay(1).say(f"sample:\n{HOSTILE}")
    generate_command._print(HOSTILE)
    out, err = capsys.readouterr()
    assert is_harmless(out)
    assert is_harmless(err)
    assert out.count(r"\x1b[2J") == 3
    assert err.count("\n") == 0


def test_outputs_of_any_encoding_and_closed_ones_are_printed_to(monkeypatch):
    latin = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    show("é is there, ∅ is not")
    assert latin.buffer.getvalue() == b"\xe9 is there, \\u2205 is not\n"
    ProgressDisplay(1).say("a")
    latin.close()
    for closed in (None, latin):
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "stderr", closed)
        display = ProgressDisplay(1, enabled=False)
        with display:
            display.say("a")
        assert not display._is_live
        assert _outputs() == {1, 2}
    monkeypatch.setattr(sys, "stdout", None)
    show("a")


def test_a_process_whose_outputs_are_closed_or_not_utf_8_prints_and_ends_with_0():
    code = """
import os, sys
from jshard.system.cli.command import run_command
def command(words):
    assert os.open(os.devnull, os.O_RDONLY) > 2  # no file gets their numbers
    print("\u2205", file=sys.stdout)
    print("\u2205", file=sys.stderr)
run_command(command)
"""
    words = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=environment, capture_output=True, check=True)
    assert done.stdout == b"\\u2205\n"
    assert done.stderr.endswith(b"\\u2205\n")
    subprocess.run(f"{shlex.join(words)} >&- 2>&- <&-", shell=True, check=True)


@pytest.mark.parametrize("kind", [jshard.UserError, RunFailed, Preempted])
def test_errors_are_one_line(kind):
    ending = command.expected_ending(kind(f"a\n{HOSTILE}"))
    assert ending is not None
    assert is_harmless(ending[1])
    assert "\n" not in ending[1]
    assert is_harmless(kind(HOSTILE)._render_traceback_()[0])  # in notebooks


def test_warnings_are_one_line():
    text = command._format_warning(f"a\n{HOSTILE}", UserWarning, "file", 1)
    assert is_harmless(text.removesuffix("\n"))
    assert text.count("\n") == 1
    text = command._format_warning(HOSTILE, DeprecationWarning, HOSTILE, 1)
    assert is_harmless(text)


def test_generated_json_is_the_same_json():
    entry = {"prompt": PLAIN, "text": HOSTILE, "tokens": [1]}
    text = generate_command._json(entry)
    assert json.loads(text) == entry
    assert is_harmless(text)
    assert "€" in text


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Path:
    """A checkpoint whose every text is hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    state = at_step(trained(make_fsdp(2, 4), steps=0), 8)
    with Checkpointer(folder / "checkpoints") as checkpointer:
        metrics = {f"loss{HOSTILE}": 1.0}
        config = {f"key{HOSTILE}": f"\nstep 99 {HOSTILE}"}
        checkpointer.save(state, metrics=metrics, config=config)
    step = folder / "checkpoints/8"
    about = json.loads((step / metadata.FILE).read_text())
    about["created"] += HOSTILE
    for key in ("versions", "mesh"):
        about[key] = {HOSTILE: HOSTILE}
    printed = HOSTILE.replace("\ud800", "")
    about["arrays"][f"opt.x{printed}\nx"] = {"shape": [2], "dtype": "int8"}
    (step / metadata.FILE).write_text(json.dumps(about))
    files = manifest.read(step) | manifest.checksum(step, metadata.FILE)
    manifest.write(step, files)
    return step


@pytest.mark.parametrize("full", [False, True])
def test_inspect_shows_hostile_metadata(full, step, capsys):
    words = [str(step.parents[1]), *["--full"] * full]
    inspect._inspect(words)
    out, _ = capsys.readouterr()
    assert is_harmless(out)
    assert r"\x1b[2J" in out
    assert not any(line.startswith(("step 99", "x")) for line in out.splitlines())


def test_what_mpirun_copies_is_no_terminal(monkeypatch):
    class Tty:
        closed = False
        isatty = staticmethod(lambda: True)

    assert is_terminal(Tty())
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert not is_terminal(Tty())

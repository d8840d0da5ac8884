"""Remarks on absent GPUs stay away, and nothing else does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jshard
from jshard.system.cli.machine.quiet import start_devices

SCRIPT = """
import os
from jshard.system.cli.machine import quiet
quiet._PLUGINS = ("json",)
quiet.has_accelerator = lambda: False
remarks = [
    "WARNING: All log messages before absl::InitializeLog() is called are written",
    "I0000 00:00:1795304417.290662 1 cudart_stub.cc:31] Could not find cuda drivers",
    "W1121 23:51:35.9 1 hlo_rematerialization.cc:3231] Can't reduce memory use below 1",
]
os.write(2, b"BEGIN\\n")  # an installed CUDA plugin has spoken before
with quiet.without_remarks():
    for line in [*remarks, "W0000 00:00:1 1 other.cc:1] a warning"]:
        os.write(2, (line + "\\n").encode())
    END
os.write(2, b"I0000 00:00:1 1 later.cc:1] after\\n")
"""


def errors(end: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", SCRIPT.replace("END", end)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    return run.stderr.partition("BEGIN\n")[2]


def test_only_remarks_are_left_out_and_only_within():
    assert errors("pass") == (
        "W0000 00:00:1 1 other.cc:1] a warning\nI0000 00:00:1 1 later.cc:1] after\n"
    )


def test_what_is_said_before_an_abort_is_not_lost():
    said = errors("os.write(2, b'F0000 the end'), os.abort()")
    assert "a warning" in said
    assert "F0000 the end" in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda': no plugin\nmore"),
            "no plugin",
        ),
        (AssertionError(), "JAX finds no such device; unset it"),
    ],
)
def test_devices_that_are_asked_for_and_not_there_are_named_in_one_line(
    error, said, monkeypatch
):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(jshard.UserError, match="JAX_PLATFORMS=cuda: ") as found:
        start_devices()
    assert said in str(found.value)
    assert "\n" not in str(found.value)

"""Signals: the first lets a run save, the second ends it."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from failures import slowly
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import Preempted
from jshard.train import main
from jshard.training.callbacks.preemption import WARNINGS, Preemption
from resumable import RECIPE

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def listening():
    """Signals as in a terminal: a shell's background job is deaf to SIGINT, and what
    nohup starts to SIGHUP; both stay so."""
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {
        number: signal.signal(number, handler) for number, handler in heard.items()
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def wait_for_request(preemption):
    deadline = time.monotonic() + 10
    while not preemption.requested(1):
        assert time.monotonic() < deadline
        time.sleep(0.001)


SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_one_line(number, listening, capsys):
    with Preemption() as preemption:
        assert not preemption.requested(1)
        assert preemption.signal_name is None
        send(number)
        wait_for_request(preemption)
        assert preemption.requested(2)
    assert preemption.signal_name == number.name
    more = "" if number in WARNINGS else "; a second signal exits at once"
    assert capsys.readouterr().err == (
        f"jshard: {number.name}: finishing the step and saving{more}\n"
    )


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize("number", WARNINGS)
def test_a_warning_may_come_again_and_before_sigterm(number, exits, listening, capsys):
    """To a process and to its parent, which passes it on; later the time is up."""
    before = signal.getsignal(number)
    with Preemption(exits=exits) as preemption:
        for again in (number, number, signal.SIGHUP, signal.SIGTERM, number):
            send(again)
            wait_for_request(preemption)
            time.sleep(0.02)
    assert preemption.signal_name == number.name
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert signal.getsignal(number) == before


def test_signals_are_given_back(listening):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    threads = threading.active_count()
    try:
        with Preemption():
            pass
        send(signal.SIGTERM)
        assert heard == [1]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert threading.active_count() == threads


def test_a_signal_that_is_ignored_stays_ignored(listening):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    with Preemption() as preemption:
        send(signal.SIGINT)
        send(signal.SIGHUP)
        time.sleep(0.05)
        assert not preemption.requested(1)
        send(signal.SIGTERM)
        wait_for_request(preemption)
    assert preemption.signal_name == "SIGTERM"
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


def test_a_signal_that_the_program_handles_itself_is_no_request():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        with Preemption() as preemption:
            send(signal.SIGUSR1)
            time.sleep(0.05)
            assert heard == [1]
            assert not preemption.requested(1)
    finally:
        signal.signal(signal.SIGUSR1, before)


IN_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_exits_75(
    listening, command, tmp_path
):
    (tmp_path / "tiny.py").write_text(slowly(RECIPE))
    keys = {"steps": 1000, "eval_every": 0, "checkpoint.every": 1000}
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    options = command(tmp_path, "--config=tiny.py", "--workdir=run", *words)
    python, *rest = options["args"]
    terminal, end = os.openpty()
    options |= {"args": [python, "-c", IN_TERMINAL, *rest], "text": False}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), end)
    with subprocess.Popen(**options, start_new_session=True) as process:
        os.close(end)
        shown = b""
        while b"loss" not in shown:
            shown += os.read(terminal, 1000)
        os.close(terminal)
        assert process.wait(timeout=60) == 75
    (step,) = find_steps(tmp_path / "run/checkpoints")
    assert 0 < step < 1000


def test_in_another_thread_signals_are_left_alone():
    requested = []

    def run():
        with Preemption() as preemption:
            requested.append(preemption.requested(1))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert requested == [False]
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_command_line_exits_75_with_one_line(monkeypatch, capsys):
    def train(argv):
        raise Preempted("SIGTERM at step 3: saved")

    monkeypatch.setattr("jshard.train._train", train)
    with pytest.raises(SystemExit, match="75"), warnings.catch_warnings():
        main()
    assert capsys.readouterr().err == "jshard: SIGTERM at step 3: saved\n"


# The main thread is in C for hours, without Python's lock.
BUSY = """\
import hashlib, signal
from jshard.training.callbacks.preemption import Preemption
signal.signal(signal.SIGINT, signal.default_int_handler)
with Preemption():
    print("listening", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.mark.quick("15-2")
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGTERM, signal.SIGINT, 130), (signal.SIGINT, signal.SIGTERM, 143)],
)
def test_the_second_signal_ends_even_a_process_that_is_busy(first, second, code):
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"listening\n"
        process.send_signal(first)
        lines = (line for line in process.stderr if line.startswith(b"jshard"))
        assert first.name.encode() in next(lines)
        process.send_signal(second)
        assert process.wait(timeout=10) == code
        said = f"jshard: {second.name} again: exiting\n"
        assert process.stderr.read().decode() == said

"""Signals: the first lets a run save, the second ends it, processes agree."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from jshard.errors import Preempted
from jshard.train import main
from jshard.training.preemption import Preemption

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def listening():
    """SIGINT as in a terminal: a shell's background job, as tests may be, is deaf."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)


def wait_for_request(preemption):
    deadline = time.monotonic() + 10
    while not preemption.requested(1):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_a_request_and_one_line(number, listening, capsys):
    with Preemption() as preemption:
        assert not preemption.requested(1)
        assert preemption.signal_name is None
        send(number)
        wait_for_request(preemption)
        assert preemption.requested(2)
    assert preemption.signal_name == number.name
    assert capsys.readouterr().err == (
        f"jshard: {number.name}: finishing the step and saving; once more exits at "
        "once\n"
    )


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
    with Preemption() as preemption:
        send(signal.SIGINT)
        send(signal.SIGTERM)
        wait_for_request(preemption)
    assert preemption.signal_name == "SIGTERM"


def test_other_signals_are_no_request():
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
from jshard.training.preemption import Preemption
signal.signal(signal.SIGINT, signal.default_int_handler)
with Preemption():
    print("listening", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


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
        assert first.name.encode() in process.stderr.readline()
        process.send_signal(second)
        assert process.wait(timeout=10) == code
        said = f"jshard: {second.name} again: exiting\n"
        assert process.stderr.read().decode() == said


# Several processes. Both step together, by a sum over both; the second one signals
# itself after its tenth step, and again after the agreed one.
PROCESS = """\
import os, signal, sys, time
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jshard.training.preemption import Preemption

number, port, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def add(x):
    return jax.lax.psum(x, "x")
add = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("x"), out_specs=P()))
ones = jax.make_array_from_process_local_data(
    jax.NamedSharding(mesh, P("x")), np.ones(1, np.float32)
)
with Preemption() as preemption:
    for step in range(1, 1000):
        add(ones).block_until_ready()
        time.sleep(0.01)
        if number == 1 and step == 10:
            os.kill(os.getpid(), getattr(signal, name))
        if preemption.requested(step):
            print("stopped", step, preemption.signal_name, flush=True)
            break
    if number == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    add(ones).block_until_ready()
    time.sleep(0.1)
    print("saved", flush=True)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_one_process_stops_all_after_the_same_step(name):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number), str(port), name],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        ends = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [
        [line for line in out.splitlines() if not line.startswith("[Gloo]")]
        for out, _ in ends
    ]
    assert [process.returncode for process in processes] == [0, 0], ends
    step = int(said[0][0].split()[1])
    assert step > 10
    assert said == [
        [f"stopped {step} SIGTERM", "saved"],
        [f"stopped {step} {name}", "saved"],
    ]

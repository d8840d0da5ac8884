"""Runs that are killed at any moment, and jobs in which one process differs."""

import collections
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jshard.training.train_command  # before the fork, as it takes seconds
from bucket_servers import BUCKET, Folder
from failures import WORDS
from jobs import Job, children, write_recipe
from jshard import export, train
from resumable import RECIPE, read_metrics

STEPS = 240
RUN = ("--config=tiny.py", f"--config.steps={STEPS}", "--config.eval_every=0")
ROWS = {
    "disk": (),
    "bucket": (),
    "local copies": (
        "--config.checkpoint.local=3",
        "--config.checkpoint.every=60",
        "--config.checkpoint.local_dir={folder}/copies",
    ),
}


def kills(names: Sequence[str], count: int, number: int) -> None:
    """Prints what came of `count` kills of each kind of run named, by default all."""
    assert jshard.training.train_command
    chance = random.Random(number)
    rows: dict[str, Callable[..., collections.Counter]] = {
        **dict.fromkeys(ROWS, _killed_runs),
        "export": _killed_exports,
        "job": _killed_jobs,
    }
    for name in names or rows:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = rows[name](Path(folder), name, count, chance)
        took, killed = time.monotonic() - began, found.pop("kills")
        print(
            f"| kills: {name} | {killed} | {dict(found) or 0} | {took:.0f} s |",
            flush=True,
        )


def _fork(
    main: Callable[[], None], words: Sequence[str], folder: Path, log: str
) -> int:
    """Runs a command in a fork of this process; returns the fork's number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.chdir(folder)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["jshard", *words]
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what runs at exit would delete the parent's folders


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _killed_runs(
    folder: Path, name: str, count: int, chance: random.Random
) -> collections.Counter:
    (folder / "tiny.py").write_text(RECIPE)
    (folder / "copies").mkdir()
    found = collections.Counter(kills=0)
    words = (*RUN, *(word.format(folder=folder) for word in ROWS[name]))
    code = _wait(_fork(train.main, [*words, "--workdir=whole"], folder, "log"))
    assert code == 0, (folder / "log").read_text()
    place = folder
    whole, workdir = read_metrics(folder / "whole"), "run"
    if name == "bucket":
        Folder(folder / "store").start()  # in the forks, too
        place, workdir = folder / "store" / BUCKET, f"s3://{BUCKET}/run"
    run = 0
    while found["kills"] < count:
        run, saved, code = run + 1, 0, -9
        while code == -9:
            own = [*words, f"--workdir={workdir}-{run}"]
            process = _fork(train.main, own, folder, "log")
            if found["kills"] < count:
                _let_go_on(folder / "log", chance)
                os.kill(process, signal.SIGKILL)
            code = _wait(process)
            found["kills"] += code == -9
            log = (folder / "log").read_text()
            if code not in (0, -9) or "Traceback" in log:
                found[f"ended with {code}: {log[-600:]}"] += 1
            for step in re.findall(r"^resuming .* after step (\d+)", log, re.M):
                found["lost a step"] += int(step) < saved
            reported = re.findall(r"^step (\d+)/\d+  checkpoint saved", log, re.M)
            saved = max([saved, *map(int, reported)])
        if code == 0 and read_metrics(place / f"run-{run}") != whole:
            found["other results"] += 1
    return +found


def _let_go_on(log: Path, chance: random.Random) -> None:
    """Until a moment in the start, or after the first step of this start."""
    deadline = time.monotonic() + chance.choice([chance.uniform(0.1, 3), 60, 60, 60])
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        if re.search(r"^step |^done|^nothing|error", text, re.M):
            time.sleep(chance.uniform(0, 0.6))
            return
        time.sleep(0.005)


def _killed_exports(
    folder: Path, name: str, count: int, chance: random.Random
) -> collections.Counter:
    del name
    (folder / "tiny.py").write_text(RECIPE)
    found = collections.Counter(kills=0)
    words = [*RUN, "--config.steps=4", "--workdir=whole"]
    assert _wait(_fork(train.main, words, folder, "log")) == 0
    began = time.monotonic()
    assert _wait(_fork(export.main, ["whole", "--output=out"], folder, "log")) == 0
    took = time.monotonic() - began
    want = _files(folder / "out")
    for number in range(count):
        words = ["whole", f"--output=out-{number}"]
        process = _fork(export.main, words, folder, "log")
        time.sleep(chance.uniform(0, took))
        os.kill(process, signal.SIGKILL)
        code = _wait(process)
        found["kills"] += code == -9
        out = folder / f"out-{number}"
        if _files(out) != want and _wait(_fork(export.main, words, folder, "log")):
            found[(folder / "log").read_text()[-600:]] += 1
        found["other results"] += _files(out) != want
    return +found


def _files(folder: Path) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in folder.glob("*") if x.is_file()}


def _killed_jobs(
    folder: Path, name: str, count: int, chance: random.Random
) -> collections.Counter:
    del name
    write_recipe(folder)
    found = collections.Counter(kills=0)
    words = (*WORDS[1:3], f"--config.steps={STEPS}")
    with Job(folder, 2, 2, *words, "--workdir=whole") as job:
        assert job.wait() == [0, 0], job.err()
    whole = read_metrics(folder / "whole")
    while found["kills"] < count:
        run, codes = f"run-{found['kills']}", [1]
        while any(codes):
            with Job(folder, 2, 2, *words, f"--workdir={run}") as job:
                if found["kills"] < count:
                    _let_go_on(folder / "out-0", chance)
                    parent = job.processes[chance.randrange(2)].pid
                    if job.processes[0].poll() is None and children(parent):
                        os.kill(int(children(parent)[0]), signal.SIGKILL)
                        found["kills"] += 1
                codes = _ended(job)
                lines = job.err().splitlines()
            if any("Traceback" in line for line in lines):
                found["\n".join(lines)[-600:]] += 1
        found["other results"] += read_metrics(folder / run) != whole
    return +found


def _ended(job: Job) -> list[int]:
    """Exit codes; who waits for one killed before they met is ended by SIGTERM."""
    try:
        return job.wait(40)
    except AssertionError:
        for process in job.processes:
            process.terminate()
        return job.wait()


# What process 1 of two alone has in its environment.
DIFFERENT = {
    "learning rate of the recipe": "RATE=0.5",
    "seed of the recipe's data": "SEED=7",
    "JAX_THREEFRY_PARTITIONABLE": "JAX_THREEFRY_PARTITIONABLE=0",
    "JAX_ENABLE_X64": "JAX_ENABLE_X64=1",
    "JAX_DEFAULT_MATMUL_PRECISION": "JAX_DEFAULT_MATMUL_PRECISION=highest",
    "JAX_NUMPY_DTYPE_PROMOTION": "JAX_NUMPY_DTYPE_PROMOTION=strict",
    "JAX_DEFAULT_PRNG_IMPL": "JAX_DEFAULT_PRNG_IMPL=rbg",
    "JAX_DEBUG_NANS": "JAX_DEBUG_NANS=1",
    "XLA_FLAGS": "XLA_FLAGS=--xla_cpu_enable_fast_math=true",
    "number of devices": "",
}
_ODD = """
import os

_rate, _data = learning_rate, make_data


def learning_rate(config):
    return optax.constant_schedule(float(os.environ.get("RATE", 0.01)))


def make_data(config, split):
    config.seed += int(os.environ.get("SEED", 0))
    return _data(config, split)
"""


def differing(names: Sequence[str], count: int, number: int) -> None:
    """Prints for each variable whether the process that differs is named in time."""
    del count, number
    for name in names or DIFFERENT:
        setting = DIFFERENT[name]
        prefix = lambda index, x=setting: ["env", x] if index and x else []
        each = {} if setting else {1: ["--config.mesh.cpu_devices=1"]}
        with tempfile.TemporaryDirectory() as folder:
            write_recipe(Path(folder), lambda recipe: recipe + _ODD)
            with Job(Path(folder), 2, 2, *WORDS, prefix=prefix, each=each) as job:
                codes = job.wait()
                said = job.err().strip()
        good = codes == [2, 2] and "process 1 " in said and len(said.splitlines()) == 1
        print(f"| {name} | {'named' if good else codes} | {said[-300:]} |", flush=True)

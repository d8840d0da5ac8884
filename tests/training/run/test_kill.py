"""A run that is killed at any moment goes on as if nothing had happened."""

import random
import re
import subprocess
import time
from pathlib import Path

import pytest

from jobs import last_step
from resumable import RECIPE, read_metrics


def reported(output: str, pattern: str) -> list[int]:
    return [int(step) for step in re.findall(pattern, output, re.MULTILINE)]


def wait_for_save(checkpoints: Path, process: subprocess.Popen, suffix: str) -> None:
    """Until a save (or a deletion) is going on, or the process has ended."""
    while process.poll() is None and not any(checkpoints.glob(f"*{suffix}")):
        time.sleep(0.0005)


def wait_a_while(metrics: Path, process: subprocess.Popen, seconds: float) -> None:
    """Some seconds, or a few steps where they are fast: the kills are to come first."""
    deadline = time.monotonic() + seconds
    first = last_step(metrics)
    while process.poll() is None and time.monotonic() < deadline:
        if last_step(metrics) > first + 7:
            return
        time.sleep(0.002)


def check_kills(kills: int, command, folder: Path, seed: int = 0) -> None:
    (folder / "tiny.py").write_text(RECIPE)
    steps = 10 * kills
    words = ("--config=tiny.py", f"--config.steps={steps}", "--workdir")
    run = subprocess.run(timeout=300, **command(folder, *words, "whole"))
    assert (run.returncode, run.stderr) == (0, "")

    chance = random.Random(seed)
    checkpoints = folder / "killed/checkpoints"
    done, saved = 0, 0
    for restart in range(20 * kills):
        with open(folder / f"{restart}.log", "w+") as log:
            options = command(folder, *words, "killed") | {"stdout": log, "stderr": log}
            process = subprocess.Popen(**options)
            try:
                kind = chance.choice(["anywhere", ".saving", ".saving", ".deleting"])
                if done < kills and kind == "anywhere":
                    metrics = folder / "killed/metrics.jsonl"
                    wait_a_while(metrics, process, chance.uniform(0, 6))
                elif done < kills:
                    wait_for_save(checkpoints, process, kind)
                    time.sleep(chance.uniform(0, 0.1))
                else:
                    process.wait(timeout=300)
            finally:
                process.kill()
                code = process.wait()
            log.seek(0)
            output = log.read()
        assert code in (0, -9), output
        # What was reported as saved is where it goes on, or later.
        for resumed in reported(output, r"^resuming killed after step (\d+)"):
            assert resumed >= saved
        saved = max([saved, *reported(output, r"^step (\d+)/\d+  checkpoint saved")])
        done += code == -9
        if code == 0:
            break
    assert done >= kills
    assert saved == steps
    assert read_metrics(folder / "killed") == read_metrics(folder / "whole")
    found = sorted(path.name for path in checkpoints.iterdir())
    assert found == sorted(p.name for p in (folder / "whole/checkpoints").iterdir())


@pytest.mark.slow  # by default, test_going_on and test_promises
def test_a_kill_in_a_save_loses_repeats_and_changes_nothing(command, tmp_path):
    check_kills(1, command, tmp_path, seed=1)


@pytest.mark.slow
def test_ten_kills_at_any_moment_lose_repeat_and_change_nothing(command, tmp_path):
    check_kills(10, command, tmp_path, seed=1)

"""Jobs that are hit while they train, what must follow, and how they go on."""

import re
import time
from pathlib import Path

from jobs import Job, write_recipe

STEPS = 80
SOON = 15.0  # seconds, in which all of a job's processes must have ended
WORDS = (
    f"--config.steps={STEPS}",
    "--config.eval_every=0",
    "--config.model.noise=0",  # its draws depend on the mesh
    "--workdir=run",
)
# A process gets on no faster than a test can hit it.
SLOWLY = "    def example(i):\n", "    def example(i):\n        time.sleep(0.02)\n"


def slowly(recipe: str) -> str:
    return "import time\n" + recipe.replace(*SLOWLY)


def check_end(job: Job, since: float, code: int = 1) -> float:
    """All end soon with this code, and nothing is left; returns the seconds."""
    codes = job.wait(SOON + 15)
    took = time.monotonic() - since
    assert took < SOON, f"{took}\n{job.err()}"
    assert set(codes) == {code}, f"{codes}\n{job.err()}"
    deadline = time.monotonic() + 2  # a worker whose parent was killed
    while job.leftovers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.leftovers() == []
    return took


def check_names(job: Job, victim: int) -> None:
    """The terminal names the process, and the step that each had reached."""
    text = job.err()
    lines = [line for line in text.splitlines() if "last reported: " in line]
    assert any(re.search(rf"error: process {victim}\b", line) for line in lines), text
    assert all("at step" in line.partition("last reported")[2] for line in lines), text
    assert "Traceback" not in text, text
    assert not re.search(r"^[EF]\d{4} ", text, re.MULTILINE), text  # C++'s


def go_on(folder: Path, processes: int = 2, devices: int = 2) -> None:
    """The same command, to the end."""
    with Job(folder, processes, devices, *WORDS) as job:
        assert job.wait() == [0] * processes, job.err()
    # The first checkpoint may not have been whole by then.
    assert re.search(r"resuming run after step|starting again from step 1", job.out())


def train_until(folder: Path, step: int, count: int = 2, devices: int = 2) -> Job:
    write_recipe(folder, slowly)
    job = Job(folder, count, devices, *WORDS)
    job.wait_for_step(folder / "run", step)
    return job

"""How long a job takes to end when one of its processes is killed, stopped or cut off.

    python benchmarks/failures.py

Jobs of two processes with two CPU devices each, `python -m jshard.train` on a small
model, hit at random steps by the means of the tests. Prints a markdown table: seconds
from the harm until the last process of the job has ended, with nothing left.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from failures import WORDS, slowly
from jobs import Job, write_recipe
from network import Network


def send(number: int, victim: int) -> Callable[[Job], None]:
    return lambda job: os.kill(job.worker(victim), number)


HARMS = {
    "process 1 killed": send(signal.SIGKILL, 1),
    "process 0 killed": send(signal.SIGKILL, 0),
    "process 1 stopped": send(signal.SIGSTOP, 1),
    "process 0 stopped": send(signal.SIGSTOP, 0),
}


def seconds_to_end(folder: Path, harm: Callable[[Job], None], **options) -> float:
    write_recipe(folder, slowly)
    with Job(folder, 2, 2, *WORDS, **options) as job:
        job.wait_for_step(folder / "run", random.randrange(8, 50))
        harm(job)
        since = time.monotonic()
        job.wait()
        took = time.monotonic() - since
        assert not job.leftovers()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| | least s | median s | most s |\n|---|---|---|---|")

    def row(name: str, once: Callable[[Path], float]) -> None:
        times = []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                times.append(once(Path(folder)))
        median = statistics.median(times)
        print(f"| {name} | {min(times):.1f} | {median:.1f} | {max(times):.1f} |")

    for name, harm in HARMS.items():
        row(name, lambda folder, harm=harm: seconds_to_end(folder, harm))

    def cut(folder: Path) -> float:
        network = Network()
        try:
            return seconds_to_end(
                folder,
                lambda job: network.cut(),
                prefix=network.run_in,
                coordinator=network.address(0),
            )
        finally:
            network.remove()

    try:
        row("connection cut", cut)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"connection cut: this machine makes no network namespaces: {error}")


if __name__ == "__main__":
    main()

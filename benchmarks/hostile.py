"""What hostile input and kills do: tracebacks, wrong results, steps lost or done twice.

    python benchmarks/hostile.py mutations --count=400    # or with names of readers
    python benchmarks/hostile.py flips --count=10000
    python benchmarks/hostile.py kills --count=300        # or with names of rows
    python benchmarks/hostile.py differing

Prints rows of a markdown table. What is changed at random is read in a process that can
write to one folder only (`unshare`), as its names may lead anywhere.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from jail import check_jail, jailed
from kit import hostile_input, hostile_runs

CONFINED = {"mutations": hostile_input.mutations, "flips": hostile_input.flips}
RUNS = {"kills": hostile_runs.kills, "differing": hostile_runs.differing}
_INSIDE = "JSHARD_JAILED"


def main() -> None:
    parser = argparse.ArgumentParser(description="What hostile input and kills do.")
    parser.add_argument("what", choices=[*CONFINED, *RUNS])
    parser.add_argument("names", nargs="*", help="of rows; by default all")
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.what in CONFINED and _INSIDE not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            check_jail(Path(folder))
            words = [sys.executable, str(Path(__file__).absolute()), *sys.argv[1:]]
            env = os.environ | {_INSIDE: "1", "PYTHONDONTWRITEBYTECODE": "1"}
            command = jailed(Path(folder), words)
            sys.exit(subprocess.run(command, cwd=folder, env=env).returncode)
    run = (CONFINED | RUNS)[options.what]
    run(options.names, options.count, options.seed)


if __name__ == "__main__":
    main()

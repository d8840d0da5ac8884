"""Which part of the long tests .ci/run takes, and which parts have passed.

    python3 .ci/turns.py show REPOSITORY PARTS     # when each part passed last
    python3 .ci/turns.py raise REPOSITORY          # this turn has passed

.ci/turn has a number: turn 17 of 8 parts takes part 2. When all of .ci/run has passed,
it raises the number, and what lands commits that: any 8 landings in a row run all 8
parts, however many commits each has. So git's log of the file tells what has passed.
"""

import subprocess
import sys
from pathlib import Path

LIMIT = 150  # commits after which a number that nobody committed is an error
FILE = ".ci/turn"


def git(repository: Path, *words: str) -> str:
    """What a command of git prints."""
    command = ["git", "-C", str(repository), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def raises(repository: Path) -> list[tuple[str, int]]:
    """The commits that changed the number, with what it was then, oldest first."""
    commits = git(repository, "log", "--reverse", "--format=%h", "--", FILE).split()
    return [(c, int(git(repository, "show", f"{c}:{FILE}"))) for c in commits]


def commits_since(repository: Path, commit: str) -> int:
    """How many commits came after one."""
    return int(git(repository, "rev-list", "--count", f"{commit}..HEAD"))


def show(repository: Path, parts: int) -> None:
    """Prints the commit that counted the last pass of each part."""
    passed, before = {}, 0
    for commit, number in raises(repository):
        passed |= {turn % parts: commit for turn in range(before, number)}
        before = number
    now = int((repository / FILE).read_text()) % parts
    for part in range(parts):
        last = "not yet"
        if part in passed:
            commit = passed[part]
            last = f"passed {commits_since(repository, commit)} commits ago ({commit})"
        print(f"part {part + 1} of {parts}: {last}{' <- now' * (part == now)}")


def raise_turn(repository: Path) -> None:
    """Counts a pass.

    Raises:
      SystemExit: nobody has committed the number for long.
    """
    number = int((repository / FILE).read_text()) + 1
    (repository / FILE).write_text(f"{number}\n")
    print(f"{FILE} is {number} now: commit it, for the next part")
    if changes := raises(repository):
        since = commits_since(repository, changes[-1][0])
        if since > LIMIT:
            sys.exit(f"{since} commits since {FILE} was committed last: commit it now")


if __name__ == "__main__":
    act, repository, *parts = sys.argv[1:]
    {"show": show, "raise": raise_turn}[act](Path(repository), *map(int, parts))

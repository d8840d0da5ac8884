"""How many small mistakes the tests of their own room find: a mutation score by room.

    pip install -e '.[test,mutants]'
    python tests/mutants.py                          # 300 mutants
    python tests/mutants.py layout --count=50 --seed=7

Cosmic Ray lists what can be changed in each file of a room: a bound, a number by one,
an operator, a condition, a loop, a handler. A sample of these changes is made one by
one, in a copy of the files that git tracks, and the default tests in the folder of the
same name run. A change that they do not notice is printed. It is a test to write or,
where both programs compute the same, an entry of tests/equal_mutants.txt.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cosmic_ray.work_db import use_db  # pyright: ignore[reportMissingImports]
from cosmic_ray.work_item import (  # pyright: ignore[reportMissingImports]
    WorkItem,
    WorkResult,
)

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from jail import check_jail, jailed

REPOSITORY = Path(__file__).parents[1]
EQUAL = REPOSITORY / "tests" / "equal_mutants.txt"
ROOMS = (
    "sharding/layout",
    "sharding/collectives",
    "sharding/update",
    "storage/checkpoint",
    "data",
    "nn",
)
# What a maintainer mistakes. Others (`+` for `**`) fail in the first test that runs
# them, or are within annotations (`int | None`), which nothing runs.
OPERATORS = re.compile(
    r"core/(NumberReplacer|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue"
    r"|ReplaceContinueWithBreak|ZeroIterationForLoop|ExceptionReplacer"
    r"|ReplaceUnaryOperator_(Delete_Not|USub_UAdd)"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_FloorDiv|FloorDiv_Mul|Div_Mul|Mod_FloorDiv)"
    r"|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot"
    r"|IsNot_Is))"
)
CONFIG = """
[cosmic-ray]
module-path = {modules}
timeout = {timeout}
excluded-modules = []
test-command = {command}
[cosmic-ray.distributor]
name = "local"
"""
SECONDS = 300  # of one mutant; one that takes longer hangs, which is red, too


def copy_to(folder: Path) -> None:
    """Copies what git tracks."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name, follow_symlinks=False)


def _file_name(room: str) -> str:
    return room.replace("/", "_")


def test_command(room: str) -> list[str]:
    """The command of a room's own tests, which ends at the first that fails."""
    words = "-m pytest -n 0 -x -q --no-header -p no:cacheprovider --tb=line".split()
    return [sys.executable, *words, f"tests/{room}"]


def environment(folder: Path) -> dict[str, str]:
    """Variables of the tests: most of each run is what the run before compiled.

    XLA's programs are looked up by what they were made of, and bytecode by the time of
    its file, so a change is compiled: a run takes longer than the second of that time.
    """
    programs = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / ".programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
    }
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | programs


def sample(session: Path, count: int, seed: int) -> None:
    """Leaves so many mutants of all that a session lists."""
    with use_db(session) as db:
        usual = [
            x for x in db.work_items if OPERATORS.match(x.mutations[0].operator_name)
        ]
        usual.sort(key=place)
        chosen = random.Random(seed).sample(usual, min(count, len(usual)))
        db.clear()
        db.add_work_items(chosen)


def place(item: WorkItem) -> tuple:
    """Where a mutant is, for an order that does not change from run to run."""
    (change,) = item.mutations
    return (
        str(change.module_path),
        change.start_pos,
        change.operator_name,
        change.occurrence,
    )


def results(session: Path) -> dict[str, WorkResult]:
    """What came of each mutant."""
    with use_db(session) as db:
        return dict(db.results)


def forget_green(session: Path) -> None:
    """Lets Cosmic Ray make the mutants that stayed green again."""
    red = {job: x for job, x in results(session).items() if x.is_killed}
    with use_db(session) as db:
        items = db.work_items
        db.clear()
        db.add_work_items(items)
        for job, result in red.items():
            db.set_result(job, result)


def make(folder: Path, room: str, session: Path, count: int, seed: int) -> None:
    """Makes the mutants of a room, one by one, in a copy of the repository.

    Raises:
      SystemExit: the room's tests fail without any mutant.
    """
    check_jail(folder)
    command, env = jailed(folder, test_command(room)), environment(folder)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"tests/{room} fails as it is:\n{done.stdout[-2000:]}")
    files = sorted((folder / "jshard" / room).rglob("*.py"))
    modules = json.dumps([str(file.relative_to(folder)) for file in files])
    config = folder / f"{_file_name(room)}.toml"
    words = {
        "modules": modules,
        "command": json.dumps(shlex.join(command)),
        "timeout": SECONDS,
    }
    config.write_text(CONFIG.format(**words))
    tool = [sys.executable, "-m", "cosmic_ray.cli"]
    if session.exists():
        forget_green(session)
    else:
        subprocess.run(
            [*tool, "init", str(config), str(session)], cwd=folder, check=True
        )
        sample(session, count, seed)
    execute = [*tool, "exec", str(config), str(session)]
    subprocess.run(execute, cwd=folder, env=env, check=True)


def equal() -> dict[str, str]:
    """The mutants that compute the same as the program, and why."""
    blocks = EQUAL.read_text().strip().split("\n\n")
    pairs = [block.rpartition("\n# ") for block in blocks if not block.startswith("#")]
    return {change: why for change, _, why in pairs}


def change_of(diff: str) -> str:
    """The lines of a diff that say what was changed, and in which file."""
    (file,) = re.findall(r"^--- .*?(jshard/\S+)", diff, re.M)
    lines = [
        x for x in diff.splitlines() if x[:1] in "+-" and x[:3] not in ("+++", "---")
    ]
    return "\n".join([file, *(line[0] + " " + line[1:].strip() for line in lines)])


def report(sessions: Path, rooms: list[str]) -> int:
    """Prints each room's score, and what stayed green; gives how many did."""
    known, made, red, same = equal(), 0, 0, 0
    for room in rooms:
        found = results(sessions / f"{_file_name(room)}.sqlite").values()
        changes = sorted(change_of(x.diff) for x in found if not x.is_killed)
        green = [change for change in changes if change not in known]
        print("\n\n".join(green), end="\n\n" if green else "")
        alike = len(changes) - len(green)
        killed = len(found) - len(changes)
        print(f"{room}: {killed} of {len(found) - alike} red, {alike} equal\n")
        made, red, same = made + len(found), red + killed, same + alike
    print(f"all: {red} of {made - same} red ({red / (made - same):.1%}), {same} equal")
    return made - same - red


def main() -> None:
    """Makes the mutants of the rooms, two rooms at a time."""
    parser = argparse.ArgumentParser(description="Scores small mistakes by room.")
    parser.add_argument("rooms", nargs="*", default=ROOMS, help="folders of jshard/")
    parser.add_argument("--count", type=int, default=50, help="mutants per room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sessions",
        type=Path,
        help="a folder for Cosmic Ray's sessions; of one that is there, only what the "
        "tests did not notice is made again",
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        sessions = (options.sessions or Path(scratch) / "sessions").resolve()
        sessions.mkdir(parents=True, exist_ok=True)

        def in_a_copy(room: str) -> None:
            folder = Path(scratch) / _file_name(room)
            copy_to(folder)
            session = sessions / f"{_file_name(room)}.sqlite"
            make(folder, room, session, options.count, options.seed)

        if not options.report:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(in_a_copy, options.rooms))
        sys.exit(bool(report(sessions, options.rooms)))


if __name__ == "__main__":
    main()

"""The rings of the suite: which tests run, and the CPU seconds that they may take.

``-m core`` has one test for each promise, ``--touched`` the tests of the files that git
says have changed, and the default all tests that are not slow. A run of a whole ring
prints its CPU seconds, at the speed of the machine of docs/figures/tests.md. In CI it
fails when they exceed the ring's limit; elsewhere they are only printed.
"""

import os
import re
import subprocess
import zlib
from pathlib import Path

import pytest

from machine import slower

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
TABLE = REPOSITORY / "docs" / "architecture.md"
# CPU seconds, of this process and all that it starts, by pytest's -m. Two cores have 90
# in the 45 s that the first ring may take; the goal of the third is 700.
LIMITS = {"core": 90, "not slow": 850}
CHANGED = pytest.StashKey[frozenset[Path]]()
SECONDS = pytest.StashKey[float]()
SLOWER = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts alone")
    parser.addoption(
        "--touched",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="run the tests of the files that have changed since COMMIT (HEAD), by "
        "the table in docs/architecture.md",
    )


def pytest_configure(config):
    config.stash[SECONDS] = 0.0
    if commit := config.getoption("--touched"):
        found = {test for file in changed(commit) for test in tests_of(file)}
        config.stash[CHANGED] = frozenset(REPOSITORY / test for test in found)


def pytest_ignore_collect(collection_path, config):
    """Imports no test file of which nothing would run: that takes long, too."""
    if collection_path.suffix != ".py":
        return None
    if config.option.markexpr == "core":
        return "pytest.mark.core" not in collection_path.read_text() or None
    if CHANGED in config.stash:
        files = config.stash[CHANGED]
        return not (collection_path in files or files & {*collection_path.parents})
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Takes a part of what is selected; a test's own is the same in every change."""
    if part := config.getoption("--part"):
        number, count = map(int, part.split("/"))
        kept = [x for x in items if zlib.crc32(x.nodeid.encode()) % count == number - 1]
        config.hook.pytest_deselected(items=[x for x in items if x not in {*kept}])
        items[:] = kept


def changed(commit):
    """The files that differ from a commit, those that git does not track included.

    Raises:
      UsageError: git does not know the commit.
    """
    found = set()
    for words in (
        ["diff", "--name-only", commit],
        ["ls-files", "-o", "--exclude-standard"],
    ):
        command = ["git", "-C", str(REPOSITORY), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            why = done.stderr.partition("\n")[0]
            raise pytest.UsageError(f"--touched={commit}: {why}")
        found |= {*done.stdout.splitlines()}
    return sorted(found)


def rows():
    """The table of docs/architecture.md: pairs of where to change it and its tests."""
    table = TABLE.read_text().partition("\n## Where to change what\n")[2]
    cells = [line.split("|")[2:4] for line in table.splitlines() if line[:1] == "|"]
    return [
        tuple(re.findall(r"`([\w./]+)`", cell) for cell in row) for row in cells[2:]
    ]


def tests_of(file):
    """The tests of a file: its rows', its folder's, or itself if it is a test."""
    top, *folders = Path(file).parts
    if top == "tests":
        found = [file] if Path(file).name.startswith("test_") else []
    else:
        found = [
            test for where, tests in rows() if starts(file, where) for test in tests
        ]
    if top == "jshard" and len(folders) > 1:
        places = (
            Path("tests", *folders[:end]) for end in range(len(folders) - 1, 0, -1)
        )
        found.append(str(next(x for x in places if (REPOSITORY / x).is_dir())))
    return [test for test in found if (REPOSITORY / test).exists()]


def starts(file, places):
    """Whether one of the places is the file, or a folder that has it."""
    return any(file == x or (x.endswith("/") and file.startswith(x)) for x in places)


def own_seconds(children=True):
    """CPU seconds of this process, and of those that it has waited for."""
    return sum(os.times()[: 4 if children else 2])


def is_whole(config):
    """Whether all tests of a ring run."""
    options = config.option
    narrowed = (options.keyword, options.part, options.deselect)
    return (
        config.args_source is config.ArgsSource.TESTPATHS
        and options.markexpr in LIMITS
        and CHANGED not in config.stash
        and not any(narrowed)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Adds what a process of pytest-xdist has used."""
    node.config.stash[SECONDS] += getattr(node, "workeroutput", {}).get("seconds", 0.0)


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["seconds"] = own_seconds()
        return
    # pytest-xdist's processes are children, too, and have told theirs.
    config.stash[SECONDS] += own_seconds(children=not config.stash[SECONDS])
    if not is_whole(config):
        return
    config.stash[SLOWER] = slower()
    seconds = config.stash[SECONDS] / config.stash[SLOWER]
    if "CI" in os.environ and not exitstatus:
        if seconds > LIMITS[config.option.markexpr]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if SLOWER in config.stash:
        most, times = LIMITS[config.option.markexpr], config.stash[SLOWER]
        seconds = config.stash[SECONDS]
        line = f"{seconds / times:.0f} CPU seconds, of at most {most}"
        if times > 1:
            line += f" ({seconds:.0f} here, {times:.2f} times as slow)"
        terminalreporter.write_line(line)
    nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing and config.option.markexpr == "not slow":
        terminalreporter.write_line("only slow tests here: pytest -m slow runs them")

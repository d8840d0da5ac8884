"""The rings of the suite: which tests run, and the CPU seconds that they may take.

``-m core`` has a test for each promise, ``--touched`` those of the files that git says
have changed, and the default all that are not slow. A run of a whole ring prints its CPU
seconds. In CI it fails when they exceed the ring's limit; elsewhere a machine may be slow.
"""

import os
import subprocess
import tomllib
import zlib
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
WHERE = TESTS / "where.toml"
# CPU seconds, of this process and all that it starts, by pytest's -m. Two cores have 90
# in the 45 s that the first ring may take.
LIMITS = {"core": 90, "not slow": 700}
CHANGED = pytest.StashKey[frozenset[Path]]()
SECONDS = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts alone")
    parser.addoption(
        "--touched",
        nargs="?",
        const="HEAD",
        metavar="COMMIT",
        help="run the tests of the files that have changed since COMMIT (HEAD), by "
        "tests/where.toml",
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
    for words in (["diff", "--name-only", commit], ["ls-files", "-o", "--exclude-standard"]):
        command = ["git", "-C", str(REPOSITORY), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise pytest.UsageError(f"--touched={commit}: {done.stderr.strip()}")
        found |= {*done.stdout.splitlines()}
    return sorted(found)


def rows():
    """The table of tests/where.toml."""
    return tomllib.loads(WHERE.read_text())["row"]


def tests_of(file):
    """The tests of a file: its rows', or itself if it is a test."""
    path = Path(file)
    if path.parts[0] == "tests" and path.name.startswith("test_"):
        return [file] if (REPOSITORY / path).exists() else []
    return [
        test
        for row in rows()
        if any(fnmatch(file, f"{where}*") for where in row["where"])
        for test in row["tests"]
    ]


def own_seconds(children=True):
    """CPU seconds of this process, and of those that it has waited for."""
    return sum(os.times()[: 4 if children else 2])


def is_whole(config):
    """Whether all tests of a ring run."""
    options = config.option
    narrowed = options.keyword or options.part or options.deselect or options.lf
    return (
        config.args_source is config.ArgsSource.TESTPATHS
        and options.markexpr in LIMITS
        and CHANGED not in config.stash
        and not narrowed
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
    if is_whole(config) and "CI" in os.environ and not exitstatus:
        if config.stash[SECONDS] > LIMITS[config.option.markexpr]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if is_whole(config):
        most = LIMITS[config.option.markexpr]
        terminalreporter.write_line(
            f"{config.stash[SECONDS]:.0f} CPU seconds, of at most {most}"
        )
    nothing = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if nothing and config.option.markexpr == "not slow":
        terminalreporter.write_line("only slow tests here: pytest -m slow runs them")

"""The rings of the suite: what runs in each, and the CPU seconds that it may take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rings

REPOSITORY = Path(__file__).parents[2]
SUITE = """
import pytest, time

def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.mark.core
def test_promise():
    spend(0.1)

@pytest.mark.parametrize("x", range(6))
def test_other(x):
    spend(0.1)
"""
TWO_PROCESSES = ["-p", "xdist.plugin", "-n", "2"]
INI = """
[pytest]
testpaths = tests
markers =
  core: ring 1
  slow: nightly
addopts = -m "not slow"
"""


# Runs pytest for each line, in a fork of its own: its CPU seconds begin at none.
SERVER = """
import contextlib, json, os, sys
import pytest, _pytest.terminal, rings, xdist.plugin

for line in sys.stdin:
    folder, environment, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.environ.update(environment)
        with open("out", "w") as file, contextlib.redirect_stdout(file):
            os.dup2(file.fileno(), 1)
            del sys.modules["rings"]
            code = int(pytest.main(["-q", *words]))
        os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    """A process that has imported pytest, and little else."""
    environment = {k: v for k, v in os.environ.items() if k != "CI"} | {
        "PYTHONPATH": str(REPOSITORY / "tests/helpers"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for name in [x for x in environment if x.startswith(("PYTEST_XDIST", "COV_"))]:
        del environment[name]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.communicate(timeout=100)


@pytest.fixture
def suite(server, tmp_path):
    """Runs pytest in a project of two files, whose rings may take what is given."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "tests/test_small.py").write_text(SUITE)
    (tmp_path / "tests/test_broken.py").write_text("import no_such_module")

    def run(*words, ci="1", summed=1e6, **limits):
        conftest = f"import machine, rings\nrings.LIMITS.update({limits})\n"
        conftest += f"machine.SUMMED = {summed}\n"
        (tmp_path / "tests/conftest.py").write_text(
            f'{conftest}pytest_plugins = ["rings"]\n'
        )
        environment = {"CI": ci} if ci else {}
        server.stdin.write(json.dumps([str(tmp_path), environment, words]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return code, (tmp_path / "out").read_text()

    return run


# By default the seconds of two processes are too many below.
@pytest.mark.parametrize(
    "processes", [[], pytest.param(TWO_PROCESSES, marks=pytest.mark.slow)]
)
def test_a_ring_that_takes_too_long_is_red_in_ci(suite, processes):
    words = ("-m", "core", *processes)
    code, out = suite(*words, core=0.1)
    assert (code, "1 passed" in out) == (1, True)
    assert "CPU seconds, of at most 0.1" in out
    assert suite(*words, core=100)[0] == 0


def test_a_slow_machine_may_take_longer(suite):
    code, out = suite("-m", "core", summed=1e-6, core=0.1)
    assert (code, "0 CPU seconds, of at most 0.1 (" in out) == (0, True), out
    assert "times as slow)" in out


def test_elsewhere_its_seconds_are_printed_and_it_is_green(suite):
    code, out = suite("-m", "core", ci=None, core=0.1)
    assert (code, "CPU seconds, of at most 0.1" in out) == (0, True)


def test_the_seconds_of_all_processes_count(suite):
    ignored = ("--ignore=tests/test_broken.py",)  # leaves the run whole
    code, out = suite(*TWO_PROCESSES, *ignored, **{"not slow": 0.65})
    assert (code, "7 passed" in out) == (1, True), out
    assert "CPU seconds, of at most 0.65" in out


def test_part_of_a_ring_is_held_to_nothing(suite):
    for words in (["-k", "promise"], ["--part=1/1"], ["tests/test_small.py"]):
        code, out = suite("-m", "core", *words, core=0.0)
        assert (code, "CPU seconds" in out) == (0, False), words


def test_ring_1_imports_only_files_that_have_a_test_in_it(suite):
    assert suite("-m", "core", core=100)[0] == 0  # test_broken.py is there
    assert suite()[0] == 2


def test_each_test_is_in_one_part_whatever_other_tests_there_are(suite):
    def ids(*words):
        out = suite("--collect-only", "tests/test_small.py", *words)[1]
        return {line for line in out.splitlines() if "::" in line}

    parts = [ids("--part=1/2"), ids("--part=2/2")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 7
    assert all(parts)
    assert ids("--part=1/2", "-k", "2 or promise") <= parts[0]


def python_files():
    folders = ("jshard", "models", "train")
    files = (path for name in folders for path in (REPOSITORY / name).rglob("*.py"))
    names = {str(path.resolve().relative_to(REPOSITORY)) for path in files}
    return sorted(names - {"jshard/sharding/float8/__init__.py"})


@pytest.mark.parametrize(
    "file", ["jshard/sharding/units/stack.py", "models/gpt.py", "README.md"]
)
def test_a_change_touches_the_tests_that_the_table_names(file):
    found = rings.tests_of(file)
    expected = {
        "jshard/sharding/units/stack.py": {
            "tests/sharding/units", "tests/sharding/units/test_closed_form.py",
            "tests/sharding/units/test_schedules.py", "tests/test_parity.py",
            "tests/sharding/collectives/test_collectives.py",
        },
        "models/gpt.py": {"tests/recipes/"},
        "README.md": {"tests/docs/"},
    }  # fmt: skip
    assert {*found} == expected[file]


def test_every_file_has_tests_that_are_there():
    assert len(python_files()) > 300
    assert [file for file in python_files() if not rings.tests_of(file)] == []
    for where, tests in rings.rows():
        for path in (*where, *tests):
            assert (REPOSITORY / path).exists(), path


def test_a_changed_test_is_its_own():
    assert rings.tests_of("tests/sharding/units/test_units.py") == [
        "tests/sharding/units/test_units.py"
    ]
    assert rings.tests_of("tests/test_gone.py") == []
    assert rings.tests_of("tests/conftest.py") == []


def test_a_commit_that_git_does_not_know_is_one_line():
    with pytest.raises(pytest.UsageError, match=r"^--touched=nothing: fatal: [^\n]*$"):
        rings.changed("nothing")


@pytest.mark.slow  # ring 1 has a limit of its own
def test_ring_1_has_about_forty_tests():
    files = [
        x for x in (REPOSITORY / "tests").rglob("test_*.py") if x != Path(__file__)
    ]
    marks = sum(file.read_text().count("pytest.mark.core") for file in files)
    assert 35 <= marks <= 50

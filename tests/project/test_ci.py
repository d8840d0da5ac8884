"""The stages of .ci/run, its parts by commit, and what runs at night and on a push."""

import ast
import contextlib
import hashlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
RUN = (REPOSITORY / ".ci/run").read_text()
NOXFILE = REPOSITORY / "noxfile.py"
NIGHTLY = {"mutants"}
# One of four commits runs each of these: they are long.
LONG = ("finetune", "equinox", "foreign", "notebook")
COMMITS = [hashlib.sha1(bytes([i])).hexdigest() for i in range(24)]


class Skipped(Exception):
    pass


class Session:
    """A session of nox that writes down what would run."""

    def __init__(self, *posargs: str):
        self.posargs = posargs
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []

    def run(self, *words, env=None, **options):
        self.commands.append(" ".join(map(str, words)))
        self.environments.append({**os.environ, **(env or {})})

    def skip(self, why):
        raise Skipped(why)

    def error(self, why):
        """Nothing ran that could have printed what a stage looks for."""

    def chdir(self, folder):
        return contextlib.nullcontext()

    def parts(self) -> list[tuple[int, int]]:
        """The K and N of each --part=K/N."""
        found = re.findall(r"--part=(\d+)/(\d+)", " ".join(self.commands))
        return [(int(k), int(n)) for k, n in found]


@pytest.fixture
def stages(tmp_path):
    """What noxfile.py defines, without nox, and with what a developer has exported."""
    nox = ModuleType("nox")
    vars(nox).update(
        session=lambda stage=None, name="": stage or (lambda stage: stage),
        Session=Session,
        options=SimpleNamespace(),
    )
    exported = {"JAX_COMPILATION_CACHE_DIR": "warm", "PYTHONPATH": "elsewhere"}
    with (
        mock.patch.dict(os.environ, exported),
        mock.patch.dict(sys.modules, {"nox": nox}),
        mock.patch.object(sys, "path", [*sys.path]),
        mock.patch("subprocess.check_output", return_value="1a\n") as git,
    ):
        sys.modules.pop("stages", None)
        os.environ.pop("CI_RUN", None)
        found = runpy.run_path(str(NOXFILE))
        vars(sys.modules["stages"])["MADE"] = tmp_path
        yield SimpleNamespace(**found, git=git)


def sessions() -> dict[str, ast.FunctionDef]:
    """The functions of noxfile.py that nox calls, by the name that it knows."""
    found = {}
    for node in ast.parse(NOXFILE.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            [decorator] = node.decorator_list
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            names = {k.arg: ast.literal_eval(k.value) for k in keywords}
            found[names.get("name", node.name)] = node
    return found


def skipped(stage) -> bool:
    try:
        stage(Session())
    except Skipped:
        return True
    return False


def test_run_calls_each_session_once():
    rows = re.findall(r"^row(?:_beside)? ([a-z].*)", RUN, re.MULTILINE)
    called = " ".join(rows).split()
    assert sorted(called) == sorted(sessions().keys() - NIGHTLY)
    # The first ring before the suites; nothing else runs while they are timed.
    assert "core train tests slow" in rows
    before, after = RUN.split("row core train tests slow")
    assert before.count("\ntogether\n") == before.count("\nrow_beside ") == 1
    assert after.count("\ntogether\n") == after.count("\nrow_beside ") == 1


def test_each_session_says_in_a_line_what_it_is():
    for name, node in sessions().items():
        text = ast.get_docstring(node)
        assert text, name
        assert re.fullmatch(r"[A-Z].{10,70}\.", text), name


def test_the_copy_is_of_its_commit_and_takes_turns():
    known = RUN.index('git clone --quiet --shared --no-checkout . "$work/checkout"\n')
    turns = RUN.index("\nexport CI_RUN=1")
    assert known < RUN.index('\ncd "$work/checkout"') < turns < RUN.index("\nrow ")


def test_a_part_follows_from_the_commit(stages):
    def slow(commit):
        stages.git.return_value = f"{commit}\n"
        stages.slow(session := Session())
        [(part, count)] = session.parts()
        assert count == 24
        return part

    taken = [slow(commit) for commit in COMMITS]
    assert taken == [slow(commit) for commit in COMMITS]
    assert stages.git.call_args.args[0][-2:] == ["rev-parse", "HEAD"]
    assert len({*taken}) > 12  # 15 are expected
    assert [slow(f"{i:040x}") for i in range(25)] == [*range(1, 25), 1]


def test_a_part_without_tests_is_no_failure_but_nothing_else_may_be_empty(stages):
    session = mock.Mock()
    for words in ("-m slow --part=9/24", "-m core"):
        stages.pytest(session, Path("python"), words)
    codes = [call.kwargs["success_codes"] for call in session.run.call_args_list]
    assert codes == [[0, 5], [0]]


def test_a_person_chooses_the_part(stages):
    stages.slow(session := Session("3/24"))
    assert session.parts() == [(3, 24)]
    stages.slow(session := Session())
    assert session.parts() == [(0x1A % 24 + 1, 24)]  # of what is checked out


def test_every_part_is_of_the_commit(stages):
    text = NOXFILE.read_text()
    assert text.count("--part=") == text.count("{session.posargs[0]}") == 1
    for commit in COMMITS[:4]:
        os.environ["CI_RUN"], stages.git.return_value = "1", commit
        stages.h100(session := Session())
        stages.buckets(session)
        stages.huggingface(session)
        with mock.patch.dict(stages.newer.__globals__, newer_python=lambda: "python"):
            stages.jax_0_11(session)
            if sys.version_info < (3, 12):
                stages.jax_newest(session)
        assert {n for _, n in session.parts()} - {5} == {6, 8, 24}
        for k, n in session.parts():
            assert k == int(commit, 16) % n + 1


def test_a_long_stage_runs_for_one_of_four_commits(stages):
    for commit in COMMITS:
        os.environ["CI_RUN"], stages.git.return_value = "1", commit
        ran = [name for name in LONG if not skipped(vars(stages)[name])]
        assert len(ran) == 1
        assert (
            skipped(stages.gpu) == (int(commit, 16) % 2 == 1) != skipped(stages.loggers)
        )


def test_who_names_a_stage_gets_it(stages):
    for name in ("foreign", "equinox", "notebook", "gpu", "loggers", "evaluate"):
        assert not skipped(vars(stages)[name])


def test_the_first_two_rings_have_no_compiled_programs(stages):
    stages.core(session := Session())
    stages.tests(session)
    for environment in session.environments:
        assert not [name for name in environment if name.startswith(("JAX_", "PYTHON"))]
        assert environment["CI"] == "1"  # where the rings hold their CPU seconds
    assert session.commands[-2].endswith("-m pytest -m core")
    command = Path(session.commands[-1].removeprefix("bash -e ")).read_text()
    assert command in (REPOSITORY / "README.md").read_text()
    stages.slow(session)
    assert "jshard-ci" in session.environments[-1]["JAX_COMPILATION_CACHE_DIR"]


def workflow(name: str) -> dict:
    return yaml.safe_load((REPOSITORY / ".github/workflows" / name).read_text())["jobs"]


def test_the_workflow_of_each_night_runs_all_parts_on_both_versions_of_jax():
    jobs = workflow("whole.yml")
    for name in ("tests", "huggingface"):
        matrix = jobs[name]["strategy"]["matrix"]
        count = len(matrix["part"])
        assert matrix["part"] == list(range(1, count + 1))
        assert matrix["python"] == ["3.11", "3.13"]
        runs = [step["run"] for step in jobs[name]["steps"] if "run" in step]
        (words,) = (text for text in runs if "pytest" in text)
        assert words.startswith("python -m pytest -m '' --part=${{ matrix.part }}")
        assert f"}}}}/{count}" in words
    assert any("huggingface" in text for text in runs)
    for name in NIGHTLY:
        assert jobs[name]["steps"][-1]["run"] == f"nox -s {name}"


def test_a_release_needs_the_whole_suite_of_its_commit():
    jobs = workflow("publish.yml")
    (suite,) = (name for name, job in jobs.items() if "whole.yml" in str(job))
    assert jobs[suite]["uses"] == "./.github/workflows/whole.yml"
    assert jobs["build"]["needs"] == suite
    assert jobs["pypi"]["needs"] == jobs["site"]["needs"] == "build"


def test_pyright_waits_for_the_push():
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    stages = {
        hook["id"]: hook.get("stages", config["default_stages"])
        for hook in config["repos"][0]["hooks"]
    }
    assert stages.pop("pyright") == ["pre-push"]
    assert {*map(tuple, stages.values())} == {("pre-commit",)}
    assert config["default_install_hook_types"] == ["pre-commit", "pre-push"]


def test_hooks_find_the_tools_of_an_environment_that_is_not_activated(tmp_path):
    """A first commit is made in a shell where nothing is activated."""
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    hooks = config["repos"][0]["hooks"]
    assert all(hook["entry"].startswith(".ci/hook ") for hook in hooks)
    clean = {"PATH": "/usr/bin:/bin"}

    def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=clean | more, capture_output=True, text=True
        )

    assert run("git", "init", "-q").returncode == 0
    hook = str(REPOSITORY / ".ci/hook")
    missing = run(hook, "a-linter")
    assert missing.returncode == 1
    assert missing.stdout.startswith("a-linter is not installed: python3 -m venv .venv")
    for folder in (".venv", "mine"):
        tool = tmp_path / folder / "bin/a-linter"
        tool.parent.mkdir(parents=True)
        tool.write_text(f"#!/bin/sh\necho {folder} $1\n")
        tool.chmod(0o755)
    assert run(hook, "a-linter", "x").stdout == ".venv x\n"
    active = run(hook, "a-linter", "x", VIRTUAL_ENV=str(tmp_path / "mine"))
    assert active.stdout == "mine x\n"

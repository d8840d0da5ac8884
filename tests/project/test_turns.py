"""The part of the long tests that .ci/run takes: none is left out for long."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
TURNS = runpy.run_path(str(REPOSITORY / ".ci/turns.py"))
RUN = (REPOSITORY / ".ci/run").read_text()
PARTS = 8


class Project:
    """A repository whose landings have any number of commits."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / ".ci").mkdir()
        (folder / ".ci/turn").write_text("0\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", self.folder, *who, *words], check=True)

    def commit(self, count: int = 1) -> None:
        self.git("add", "-A")
        for _ in range(count):
            self.git("commit", "-q", "--allow-empty", "-m", "a change")

    def turn(self) -> int:
        return int((self.folder / ".ci/turn").read_text())

    def lines(self, capsys) -> list[str]:
        TURNS["show"](self.folder, PARTS)
        return capsys.readouterr().out.splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_landings_of_any_size_run_all_parts_in_turn(project, capsys):
    taken = []
    for commits in (8, 16, 1, 3, 8, 2, 24, 5):
        project.commit(commits - 1)
        taken.append(project.turn() % PARTS + 1)
        assert project.lines(capsys)[taken[-1] - 1].endswith("not yet <- now")
        TURNS["raise_turn"](project.folder)
        project.commit()
        capsys.readouterr()
    assert sorted(taken) == list(range(1, PARTS + 1))
    lines = project.lines(capsys)
    assert re.fullmatch(r"part 8 of 8: passed 0 commits ago \(\w+\)", lines[7])
    assert "part 6 of 8: passed 29 commits ago" in lines[5]  # 24 and 5 since then
    assert lines[0].endswith("<- now")


def test_passes_that_are_committed_together_count_each(project, capsys):
    for _ in range(3):
        TURNS["raise_turn"](project.folder)
    project.commit()
    capsys.readouterr()
    passed = ["passed 0 commits" in line for line in project.lines(capsys)]
    assert passed == [True] * 3 + [False] * 5


def test_a_turn_that_nobody_commits_is_an_error(project, capsys):
    limit = TURNS["LIMIT"]
    project.commit(limit)
    TURNS["raise_turn"](project.folder)
    project.git("commit", "-q", "--allow-empty", "-m", "without the turn")
    with pytest.raises(SystemExit, match=f"{limit + 1} commits since .* commit it now"):
        TURNS["raise_turn"](project.folder)


def test_every_part_that_run_takes_is_of_the_turn():
    assert "turn=$(<.ci/turn)\npart=$((turn % 24 + 1))/24\n" in RUN
    chosen = re.findall(r"--part=(\$part|.*/\S+)", RUN)
    assert len(chosen) == RUN.count("--part=") == 7
    for text in {*chosen} - {"$part"}:
        assert re.fullmatch(r"\$\(\(turn % (\d) \+ 1\)\)/\1", text)
    # And each of four turns has one of the stages that are long.
    assert sorted(re.findall(r"if in_turn (\d) 4; then", RUN)) == ["0", "1", "2", "3"]
    assert RUN.index("turns.py raise") > RUN.rindex("--part=")  # passes alone count


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


def test_a_release_needs_the_whole_suite_of_its_commit():
    jobs = workflow("publish.yml")
    (suite,) = (name for name, job in jobs.items() if "whole.yml" in str(job))
    assert jobs[suite]["uses"] == "./.github/workflows/whole.yml"
    assert jobs["build"]["needs"] == suite
    assert jobs["pypi"]["needs"] == jobs["site"]["needs"] == "build"

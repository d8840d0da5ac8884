"""RUN@best, RUN@5 and RUN@newest: which folder an address with a step means."""

import json
from pathlib import Path

import pytest

from bucket_servers import Folder, running
from bucket_steps import Written
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.buckets.objects import Objects
from jshard.storage.checkpoint.manifest import FILE as MANIFEST
from jshard.storage.checkpoint.selected.best_step import best_of
from jshard.storage.checkpoint.selected.run_address import find_run, names_step
from jshard.storage.hub.huggingface_folder import is_somewhere, model_path
from jshard.storage.hub.online.names import parse
from jshard.system.errors import UserError

LOSSES = {5: 1.86, 30: 2.1, 60: 2.38}


def run_of(folder: Path, losses: dict[int, float], **options: str) -> Path:
    """A run's folder, with what tells its checkpoints apart."""
    for step, loss in losses.items():
        made = folder / "checkpoints" / str(step)
        made.mkdir(parents=True)
        (made / MANIFEST).write_text("{}")
        about = {
            "step": step, "processes": 1, "created": "", "stacks": [], "versions": {},
            "mesh": {}, "metrics": {"eval_loss": loss}, "arrays": {},
            "config": {"checkpoint": {"best": "eval_loss"} | options},
        }  # fmt: skip
        (made / metadata.FILE).write_text(json.dumps(about))
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return run_of(tmp_path / "runs/mine", LOSSES)


@pytest.mark.parametrize("run_given", ["runs/mine", "runs/mine/checkpoints"])
@pytest.mark.parametrize(
    ("step", "found"), [("best", "5"), ("30", "30"), ("60", "60"), ("newest", None)]
)
def test_a_step_after_the_run_or_in_an_option_names_its_checkpoint(
    run_given, step, found, run
):
    want = Path(run_given)
    if found is not None:
        want = Path("runs/mine/checkpoints") / found
    assert find_run(f"{run_given}@{step}") == want
    assert find_run(run_given, step) == want
    assert model_path(Path(f"{run_given}@{step}")) == want
    assert model_path(run_given, step) == want


def test_the_best_is_the_highest_where_the_run_says_so_and_never_nan(run, tmp_path):
    assert str(best_of(run / "checkpoints")) == "best: step 5, eval_loss 1.86"
    values = {1: 0.5, 2: 0.75, 3: float("nan"), 4: 0.75}
    scored = run_of(tmp_path / "scored", values, best_is="highest")
    assert find_run(scored, "best") == scored / "checkpoints/2"


@pytest.mark.parametrize("name", ["runs/mine@best", "runs/mine@5", "runs/a@b@7"])
def test_a_folder_of_that_name_comes_before_a_step_of_a_run(name, run):
    run_of(Path(name), {7: 1.0})
    assert not names_step(name)
    assert find_run(name) == Path(name)
    assert find_run(f"{name}@7") == Path(name) / "checkpoints/7"
    assert find_run("runs/mine", "5") == Path("runs/mine/checkpoints/5")


def test_a_run_here_is_no_name_on_the_hub_and_others_still_are(run):
    assert parse("runs/mine@best") is None
    assert is_somewhere("runs/mine@5")
    for name in ("org/model@best", "org/model@5", "hf://runs/mine@best"):
        found = parse(name)
        assert found is not None
        assert found.revision == name.rpartition("@")[2]
    Path("org/model").mkdir(parents=True)  # no run
    assert parse("org/model@main") is not None


@pytest.mark.parametrize(
    ("given", "step", "said"),
    [
        ("runs/mine@bst", None, "best, newest or a number; did you mean best"),
        ("runs/mine@", None, "runs/mine@: a step of a run is best, newest or a number"),
        ("runs/mine", "last", "--step=last: a step of a run is best, newest or"),
        ("runs/mine", "-1", "--step=-1: a step of a run is"),
        ("runs/mine@5", "5", "runs/mine@5 names a step: leave out --step=5"),
        (
            "runs/mine@6",
            None,
            "runs/mine has no checkpoint of step 6; it has 5, 30, 60",
        ),
        ("runs/mine/checkpoints/5@best", None, "is one checkpoint, which has no other"),
        ("empty@best", None, "empty holds no checkpoint"),
        ("plain", "best", "plain has no best checkpoint, as checkpoint.best names no"),
        ("nan@best", None, "nan has no best checkpoint, as no checkpoint has a finite"),
    ],
)
def test_what_names_no_checkpoint_is_refused_in_one_line(given, step, said, run):
    Path("empty").mkdir()
    run_of(Path("plain"), {1: 1.0}, best="")
    run_of(Path("nan"), {1: float("nan")})
    with pytest.raises(UserError, match=said):
        find_run(given, step)


def test_a_name_on_the_hub_has_no_steps():
    with pytest.raises(
        UserError, match="--step=best: org/model is not a run, but a name"
    ):
        model_path("org/model", "best")


def test_a_step_is_named_in_a_bucket_too_and_a_run_of_that_name_comes_first(tmp_path):
    with running(Folder, tmp_path / "bucket") as server:
        for name in ("run", "run@8"):
            there = Objects(f"{server.url}/{name}/checkpoints")
            written = Written(there, tmp_path / name)
            for step in (4, 8) if name == "run" else (1,):
                written.save(step)
        url = f"{server.url}/run"
        assert find_run(f"{url}@4").name == find_run(url, 4).name == "4"
        assert find_run(f"{url}/checkpoints@4/").name == "4"
        literal = find_run(f"{url}@8")
        assert [x.name for x in (literal / "checkpoints").iterdir()] == ["1"]
        assert find_run(url, "8").name == "8"
        with pytest.raises(UserError, match=f"{url} has no checkpoint of step 5; it"):
            find_run(f"{url}@5")
        with pytest.raises(UserError, match=f"{url}@bst: a step of a run is best"):
            find_run(f"{url}@bst")
        with pytest.raises(UserError, match="nothing@5 holds no checkpoint"):
            find_run(f"{server.url}/nothing@5")

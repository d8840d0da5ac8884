"""`profile.steps`: a trace of a few steps, with the names of a step's parts."""

import functools
import gzip
import json
import os
import re
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import resumable
from jshard.recipe.config.profiled_steps import profiled_steps
from jshard.recipe.config.settings import ProfileSettings, RunSettings
from jshard.sharding.settings import scopes
from jshard.system.errors import Interrupted, UserError
from jshard.system.jobs.peers import Peers
from jshard.training.callbacks.profiling import Profile
from jshard.training.run.progress import ProgressDisplay
from jshard.training.throughput import Throughput

RECIPE = """\
import grain
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

import jshard


def get_config():
    return ConfigDict({
        "steps": 5, "batch_size": 8, "log_every": 1,
        "policy": {"min_shard_elements": 0}, "checkpoint": {"every": 0},
    })


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = jshard.Unit(nnx.Embed(64, 16, rngs=rngs))
        layer = lambda rngs: nnx.Linear(16, 16, rngs=rngs)
        self.blocks = jshard.Stack(layer, 2, rngs=rngs)

    def __call__(self, x):
        return self.blocks(self.embed(x))


def make_model(config, rngs):
    return Model(rngs)


def make_optimizer(config):
    return optax.sgd(1e-2)


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(model(batch["x"]) ** 2), batch["x"].size)


def make_data(config, split):
    row = {"x": np.arange(4, dtype=np.int32)}
    return grain.MapDataset.range(16).map(lambda i: row).repeat()
"""


train = functools.partial(resumable.train, recipe=RECIPE)


def traces(run: Path) -> list[Path]:
    return sorted(run.glob("profile/plugins/profile/*/perfetto_trace.json.gz"))


def steps_of(trace: Path) -> list[int]:
    """The steps that a trace for Perfetto holds, by its annotations."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [
        event["args"]["step_num"] for event in events if event.get("name") == "step"
    ]
    return sorted(map(int, steps))


@pytest.mark.usefixtures("compiled_once")
def test_a_trace_holds_the_steps_and_the_names_of_their_parts(tmp_path, capsys):
    run = train(tmp_path, profile__steps="3:4")
    (trace,) = traces(run)
    assert steps_of(trace) == [3, 4]
    (profile,) = run.glob("profile/plugins/profile/*/*.xplane.pb")
    names = profile.read_bytes().decode("latin-1")
    for scope in (scopes.ALL_GATHER, scopes.REDUCE_SCATTER):
        assert re.search(rf"jvp\({scopes.LAYERS}\)[\w/()-]*/{scope}/", names), scope
    assert re.search(rf"jvp\({scopes.LOOK_UP}\)/", names)
    assert f"/{scopes.UPDATE}/" in names
    said = capsys.readouterr().out
    assert f"profile         steps 3 to 4, into {run / 'profile'}" in said
    assert f"profile written to {run / 'profile'} in " in said
    lines = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_names_are_metadata_alone(monkeypatch):
    monkeypatch.setattr(jshard.FSDP, "_on_cpus", False)
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
    optimizer = optax.sgd(0.1)
    make = lambda rngs: nnx.Sequential(jshard.Unit(nnx.Linear(16, 16, rngs=rngs)))
    state = fsdp.abstract_state(make, optimizer)
    step = fsdp.train_step(
        lambda model, x: jshard.Mean(jnp.sum(model(x)), len(x)), optimizer
    )
    lowered = step.lower(state, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert scopes.ALL_GATHER in lowered.as_text(debug_info=True)
    assert scopes.ALL_GATHER not in lowered.as_text()


class Hit(Peers):
    """Sends a signal to this process when it computes a step."""

    def __init__(self, step: int):
        self.place = "computing", step

    def at(self, phase: str, step: int) -> None:
        if (phase, step) == self.place:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the signal is heard


@pytest.mark.usefixtures("compiled_once")
def test_a_signal_within_the_range_leaves_a_trace_though_nothing_is_saved(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, peers=Hit(2), profile__steps="2:4")
    (trace,) = traces(tmp_path / "run")
    assert steps_of(trace) == [2]


@pytest.mark.slow  # a full disk costs one, too
@pytest.mark.usefixtures("compiled_once")
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(tmp_path, profile__steps="2:4")
    (message,) = (str(w.message) for w in warned if "profile" in str(w.message))
    assert message.startswith(f"no profile: cannot write to {tmp_path}/run/profile: ")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.usefixtures("compiled_once")
def test_a_trace_that_the_disk_refuses_costs_one_warning(tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def refuse() -> None:
        stop()
        raise RuntimeError("RESOURCE_EXHAUSTED: No space left on device\n\nstack")

    monkeypatch.setattr(jax.profiler, "stop_trace", refuse)
    with pytest.warns(UserWarning, match="No space left on device stack; training con"):
        train(tmp_path, profile__steps="2")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("given", "done", "traced", "note"),
    [
        ("2:4", 0, [2, 3, 4], "steps 2 to 4, into "),
        ("2:4", 1, [2, 3, 4], "steps 2 to 4, into "),
        ("2:4", 2, [3, 4], "steps 3 to 4, into "),
        ("2:4", 3, [4], "step 4, into "),
        ("2:4", 4, [], "none: step 4 is done already"),
        ("3", 2, [3], "step 3, into "),
        ("", 0, [], ""),
    ],
)
def test_a_run_traces_those_of_the_steps_that_are_left(
    given, done, traced, note, tmp_path, monkeypatch
):
    now = {"step": 0, "traces": False}
    seen = []

    def start(folder, **options):
        assert folder == tmp_path / "profile"
        now["traces"] = True

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: now.update(traces=False))
    settings = RunSettings(profile=ProfileSettings(given))
    run: Any = SimpleNamespace(settings=settings, workdir=tmp_path, state=None)
    run.peers = Peers()
    rate = Throughput({"x": np.ones((8, 1))}, jshard.make_mesh())
    with Profile(run, done, rate, ProgressDisplay(6, enabled=False)) as profile:
        for step in range(done + 1, 7):
            profile.before_step(step)
            seen.extend([step] * now["traces"])
            profile.after_step(step)
    assert seen == traced
    assert not now["traces"]
    assert profile.note.startswith(f"profile         {note}" if note else "")
    assert bool(profile.note) == bool(note)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_a_resumed_run_traces_the_steps_that_are_left(tmp_path, capsys):
    train(tmp_path, steps=3, checkpoint__every=3)
    train(tmp_path, profile__steps="2:4", checkpoint__every=3)
    assert "profile         step 4, into" in capsys.readouterr().out
    (trace,) = traces(tmp_path / "run")
    assert steps_of(trace) == [4]
    train(tmp_path, steps=6, profile__steps="2:4", checkpoint__every=3)
    assert "profile         none: step 4 is done already" in capsys.readouterr().out
    assert traces(tmp_path / "run") == [trace]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("4:3", "the last step comes before the first"),
        ("0:3", "steps are counted from 1"),
        ("3:6", "the run ends with step 5"),
        ("6", "the run ends with step 5"),
        *[(text, "must be FIRST:LAST") for text in ("a", "3-4", "3:", ":3", "-1:2")],
    ],
)
def test_a_range_that_cannot_be_traced_is_one_clear_line(tmp_path, steps, problem):
    with pytest.raises(UserError, match=rf"^--config.profile.steps={steps}: {problem}"):
        train(tmp_path, profile__steps=steps)
    assert not (tmp_path / "run").exists()


def test_a_range_holds_its_last_step():
    assert list(profiled_steps("3:5")) == [3, 4, 5]
    assert list(profiled_steps("3")) == [3]
    assert not profiled_steps("")

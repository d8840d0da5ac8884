"""Evaluations: exact for any number of examples, and tried before the first step."""

import functools
import json
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import multihost_utils

import jshard
from jshard.data.dataset import as_dataset
from jshard.recipe.config.settings import RunSettings
from jshard.training.callbacks.evaluation import _agreed, prepare_evaluation
from processes import Processes
from resumable import RECIPE, train
from streams import ROWS
from test_stopping import RECIPE as WITH_SAMPLE

BATCH = 24


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x))


def loss_fn(model, batch):
    """Counts by tokens, by examples, by what it computes and by calls.

    "weights" are a feature.
    """
    y = model(batch["x"] * jnp.log(batch["weights"])[:, None])
    squares, late = jnp.sum(y**2, axis=-1), y[:, 0] > 0
    named = {
        "largest": jshard.Mean(jnp.sum(jnp.max(y, axis=-1)), len(y)),
        "late": jshard.Mean(jnp.sum(squares * late), jnp.sum(late)),
        "most": jshard.nn.Max(jnp.max(y)),
    }
    of_tokens = jshard.Mean(
        jnp.sum(squares * batch["tokens"]), jnp.sum(batch["tokens"])
    )
    return 0.5 * of_tokens + jshard.Mean(2.0, 1), named


def example(index: int) -> dict:
    draw = np.random.default_rng(index)
    x, weights = draw.normal(size=4), draw.uniform(1, 2)
    return {"x": x, "tokens": np.float64(draw.integers(1, 9)), "weights": weights}


def job_of(fsdp: Any, loss: Any) -> Any:
    """What of a job an evaluation reads."""
    configured = SimpleNamespace(recipe=SimpleNamespace(loss_fn=loss))
    return SimpleNamespace(fsdp=fsdp, configured=configured)


@functools.cache
def prepared(devices: int = 8) -> tuple[Any, Any, dict]:
    """(a run, its state, its evaluation steps)."""
    policy = jshard.Policy(min_shard_elements=0)
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, policy, units=(nnx.Linear,))
    reader = {
        "batch_size": BATCH,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    run = SimpleNamespace(
        job=job_of(fsdp, loss_fn),
        abstract_state=fsdp.abstract_state(Model, optax.sgd(0.1)),
        settings=RunSettings(steps=1, batch_size=BATCH, eval_every=1),
        reader=lambda: reader,
        filled=lambda rows: rows,
    )
    return run, fsdp.init(Model, optax.sgd(0.1)), {}


def evaluated(count: int, devices: int = 8) -> tuple[dict, dict]:
    """An evaluation over so many examples, and the same without jshard."""
    with jax.enable_x64(True):
        run, state, steps = prepared(devices)
        examples = grain.MapDataset.range(count).map(example)
        got = prepare_evaluation(run, examples, steps)(state)
        full = rows_of(count)
        params = run.job.fsdp.fetch(state.params)
        kernel, bias = (params["linear"][name][...] for name in ("kernel", "bias"))
        x = full["x"] * np.log(full["weights"])[:, None]
        y = np.tanh(x @ np.asarray(kernel) + np.asarray(bias))
        squares, late = np.sum(y**2, -1), y[:, 0] > 0
        return got, {
            "eval_loss": 0.5 * np.average(squares, weights=full["tokens"]) + 2,
            "eval_largest": np.mean(np.max(y, axis=-1)),
            "eval_late": np.mean(squares[late]) if any(late) else 0.0,
            "eval_most": y.max(),
        }


def rows_of(count: int) -> dict[str, np.ndarray]:
    rows = [example(i) for i in range(count)]
    return {k: np.stack([row[k] for row in rows]) for k in rows[0]}


COUNTS = [1, 5, 8, 19, 24, 33]


@pytest.mark.quick("5-2", "19-8", "33-3")
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("count", COUNTS)
def test_examples_that_nothing_divides_are_evaluated_exactly_and_no_copies(
    count, devices
):
    got, want = evaluated(count, devices)
    assert got == pytest.approx(want, rel=1e-12)


def evaluate(loss: Any, count: int) -> dict[str, float]:
    """An evaluation of another loss, on eight devices."""
    with jax.enable_x64(True):
        run, state, _ = prepared()
        job = job_of(run.job.fsdp, loss)
        run: Any = SimpleNamespace(**vars(run) | {"job": job})
        return prepare_evaluation(run, grain.MapDataset.range(count).map(example))(
            state
        )


def test_statistics_of_a_batch_leave_copies_out():
    def loss(model, batch):
        total, count = jshard.pmean((jnp.sum(batch["x"]), batch["x"].size))
        return jshard.Mean((total / count) ** 2, 1)

    want = np.mean(rows_of(5)["x"]) ** 2
    assert evaluate(loss, 5) == pytest.approx({"eval_loss": want}, rel=1e-12)


def contrastive(model, batch):
    y = jax.lax.all_gather(model(batch["x"]), "fsdp", tiled=True)
    return jshard.Mean(jnp.sum(batch["x"] @ y.T), len(batch["x"]))


def test_devices_that_see_each_others_examples_are_given_no_copies():
    """And it is said before the first step."""
    said = r"test_evaluation.py:\d+ .*: all_gather combines .* use jshard.pmean"
    with pytest.raises(jshard.UserError, match=said):
        evaluate(contrastive, 29)
    assert np.isfinite(evaluate(contrastive, 32)["eval_loss"])


def test_a_batch_that_is_no_example_for_each_device_is_refused():
    run, state, _ = prepared()
    fsdp, rows = run.job.fsdp, rows_of(16)
    for examples, given in ((3, rows), (9, rows_of(8)), (0, rows_of(8))):
        with pytest.raises(jshard.UserError, match="must have 8, one for each device"):
            fsdp.eval_step(loss_fn, examples=examples)(state, fsdp.shard_batch(given))


@pytest.mark.slow
def test_two_processes_evaluate_them_exactly_too(tmp_path):
    with Processes(2, 4, tmp_path) as processes:
        for count in COUNTS:
            for got, want in processes.call(evaluated, count):
                assert got == pytest.approx(want, rel=1e-12)


# Before the first step.


SPLIT = "        return data[:16]\n"
NO_DATA = RECIPE.replace(SPLIT, "        return None\n")
EMPTY = RECIPE.replace(SPLIT, "        return data[:0]\n")
ENDLESS = RECIPE.replace(SPLIT, "        return data.repeat()\n")


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        (NO_DATA, {}, "make_data returned None for split 'validation'"),
        (EMPTY, {}, "has no examples"),
        (ENDLESS, {}, "is infinite"),
        (
            RECIPE,
            {"checkpoint__best": "eval_los"},
            "best=eval_los: evaluations have no such metric; they have eval_loss, "
            ".*eval_ema_loss.*; did you mean eval_loss",
        ),
        (
            WITH_SAMPLE.replace("model(prompts)", "model(prompts[:, :3])"),
            {"checkpoint__every": 0},
            "dot_general requires contracting dimensions",
        ),
    ],
)
def test_what_evaluation_or_sample_cannot_do_is_told_before_the_first_step(
    recipe, keys, said, tmp_path
):
    with pytest.raises((jshard.UserError, TypeError), match=said):
        train(tmp_path, recipe=recipe, steps=2, **keys)
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_first_step(
    tmp_path, monkeypatch
):
    usage = type("usage", (), {"total": 10_000, "free": 9_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    said = r"a checkpoint takes .*, and the disk has 8.8 KiB left"
    with pytest.raises(jshard.UserError, match=said):
        train(tmp_path, steps=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # below, batches that do not divide
def test_a_recipe_whose_batch_does_not_divide_its_validation_data_trains(tmp_path):
    recipe = RECIPE.replace(SPLIT, "        return data[:13]\n")
    recipe = recipe.replace("optax.adamw(", "optax.sgd(")
    keys: dict[str, Any] = {"checkpoint__every": 0, "policy__ema_decay": None}
    keys |= {"model__noise": 0.0}
    workdir = train(tmp_path, recipe=recipe, steps=1, eval_every=1, **keys)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    tokens = [np.random.default_rng(i).integers(0, 64, 8, np.int32) for i in range(13)]
    mean = np.mean(np.square(tokens) @ np.arange(1, 9))
    assert json.loads(lines[-1])["eval_token_sum"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("there", [[1, 0], [0, 1]])
def test_a_stream_that_ends_in_one_process_alone_ends_all_with_one_line(
    there, monkeypatch
):
    data: Any = as_dataset(ROWS.__iter__, 0, repeat=False)
    read = iter([(1, "batch")] * 3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    flags = iter([[1, 1], [1, 1], there])
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda mine: np.array(next(flags))
    )
    agreed = _agreed(data, read)
    assert [next(agreed), next(agreed)] == [(1, "batch")] * 2
    first = there.index(0)
    said = f"end after 2 batches in process {first}, and not in process {1 - first}"
    with pytest.raises(jshard.UserError, match=said):
        next(agreed)


def test_a_stream_that_ends_in_all_processes_ends(monkeypatch):
    data: Any = as_dataset(ROWS.__iter__, 0, repeat=False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        multihost_utils, "process_allgather", lambda mine: np.stack([mine, mine])
    )
    assert [*_agreed(data, iter([1, 2]))] == [1, 2]
    assert [*_agreed(grain.MapDataset.range(3), iter([1]))] == [1]

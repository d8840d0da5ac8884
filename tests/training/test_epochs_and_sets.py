"""Runs count epochs, and evaluate on several sets by name."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import jshard
from jshard.data.dataset import as_dataset, as_sets, rows_of_epoch
from jshard.data.images.image_data import mixup
from jshard.recipe.schedule.epochs import describe_epoch, take_epochs
from jshard.storage.checkpoint.selected.best_step import best_of
from jshard.system.errors import UserError

pytestmark = pytest.mark.usefixtures("compiled_once")

ROWS = np.random.default_rng(0).normal(size=(42, 4)).astype(np.float32)
TRAINED = {"inputs": ROWS}
CONFIG = {"steps": "3epochs", "batch_size": 4, "checkpoint.every": 0}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def loss_fn(model, batch):
    y = model(batch["inputs"])
    return jshard.Mean(jnp.sum(y**2), y.size), {"size": jshard.Mean(jnp.sum(y), y.size)}


def make(workdir: Path, **given: Any) -> jshard.Trainer:
    parts: dict[str, Any] = {
        "make_model": lambda config, rngs: Model(rngs),
        "make_optimizer": lambda config: optax.sgd(1e-3),
        "loss_fn": loss_fn,
        "train_data": TRAINED,
    }
    config = given.pop("whole", None) or CONFIG | given.pop("config", {})
    mesh = jshard.make_mesh(devices=jax.devices()[:2])
    return jshard.Trainer(
        config=config, workdir=workdir / "run", mesh=mesh, **(parts | given)
    )


# Epochs.


ENDLESS = grain.MapDataset.range(10).seed(1).shuffle().repeat()


@pytest.mark.parametrize(
    ("dataset", "rows"),
    [
        (grain.MapDataset.range(7), 7),
        (ENDLESS, 10),
        (ENDLESS.map(lambda x: x), 10),
        (ENDLESS.random_map(lambda x, rng: x), 10),
        (mixup(ENDLESS, 0.5, 1), 10),
        # Whose examples are several, or those of several.
        (ENDLESS.batch(3), None),
        (ENDLESS[::2], None),
        (grain.MapDataset.mix([ENDLESS, ENDLESS], [1, 2]), None),
    ],
)
def test_an_epoch_has_the_rows_that_the_data_have_before_they_repeat(dataset, rows):
    assert rows_of_epoch(dataset) == rows


def test_the_steps_of_an_epoch_are_rounded_up():
    assert describe_epoch(1234, 32) == "1,234 rows: 39 steps per epoch"
    assert describe_epoch(5, 8) == "5 rows: 1 step per epoch"


@pytest.mark.parametrize(
    ("steps", "epochs"),
    [("3epochs", 3), ("1 epoch", 1), ("0.5epochs", 0.5), ("3", None), (3, None),
     ("3epoch s", None), ("epochs", None), ("-1epochs", None)],
)  # fmt: skip
def test_a_number_of_epochs_is_told_from_one_of_steps(steps, epochs):
    nothing: Any = SimpleNamespace(get_config=ConfigDict)
    given, found = take_epochs({"steps": steps, "seed": 1}, nothing)
    assert found == epochs
    assert given["seed"] == 1
    assert epochs or given["steps"] == steps
    recipe: Any = SimpleNamespace(get_config=lambda: ConfigDict({"steps": steps}))
    assert take_epochs({"seed": 1}, recipe)[1] == epochs
    assert take_epochs({"steps": 5}, recipe) == ({"steps": 5}, None)


def test_a_whole_config_may_count_epochs(tmp_path):
    trainer = make(tmp_path, whole=ConfigDict({"steps": "2 epochs", "batch_size": 4}))
    assert trainer.config.steps == 21


def test_three_epochs_read_each_row_three_times_and_the_epoch_is_logged(
    tmp_path, capsys
):
    trainer = make(tmp_path).fit()
    assert trainer.config.steps == 32  # of 4 rows: 126 are 3 times 42
    assert "data            42 rows: 11 steps per epoch\n" in capsys.readouterr().out
    lines = [line for line in trainer.metrics if "loss" in line]
    assert [line["epoch"] for line in lines] == [4 * n / 42 for n in range(1, 33)]
    assert json.loads((tmp_path / "run/config.json").read_text())["steps"] == 32


def test_epochs_of_packed_rows_are_counted_too(tmp_path):
    from jshard.data.text.text_data import text_data

    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 20)
    data = text_data(str(tmp_path / "a.jsonl"), "train", sequence_length=32, seed=0,
                     pack=True)  # fmt: skip
    rows = rows_of_epoch(data)
    assert rows is not None
    seen = [str(data[i]) for i in range(2 * rows)]  # type: ignore[index]
    assert sorted(seen[:rows]) == sorted(seen[rows:])
    trainer = make(tmp_path, train_data=data, config={"steps": "2epochs"})
    assert trainer.config.steps == -(-2 * rows // 4)


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ({"train_data": lambda: iter(())}, "2epochs",
         "steps=2epochs: the training data do not say how many rows they have"),
        ({}, "0epochs", "steps=0: must be a whole number, or epochs like 3epochs"),
        ({}, "3epoch s", "steps='3epoch s': must be a whole number, or epochs like"),
    ],
)  # fmt: skip
def test_epochs_that_cannot_be_counted_are_refused(given, steps, said, tmp_path):
    with pytest.raises(UserError, match=said):
        make(tmp_path, config={"steps": steps}, **given)


# Sets.


LISTED = [{"inputs": row} for row in ROWS[:9]]
SETS = {
    "en": LISTED,
    "de": grain.MapDataset.source(ROWS[9:14]).map(lambda row: {"inputs": row}),
    "nested": {"inputs": ROWS[14:]},
}


def mean(rows: np.ndarray) -> Any:
    return pytest.approx(np.mean(rows.astype(np.float64).sum(1) ** 2), rel=1e-5)


def test_each_validation_set_has_its_metrics_and_all_of_them_have_theirs(tmp_path):
    config = {"steps": 1, "eval_every": 1, "checkpoint.every": 1} | {
        "checkpoint.best": "eval_de_loss"
    }
    trainer = make(
        tmp_path,
        validation_data=SETS,
        config=config,
        make_optimizer=lambda config: optax.sgd(0.0),  # the model stays as it is
    ).fit()
    found = trainer.evaluate()
    assert found["eval_en_loss"] == mean(ROWS[:9])
    assert found["eval_de_loss"] == mean(ROWS[9:14])
    assert found["eval_nested_loss"] == mean(ROWS[14:])
    assert found["eval_loss"] == mean(ROWS)
    assert found["eval_de_size"] == pytest.approx(ROWS[9:14].sum(1).mean(), rel=1e-4)
    # A test has sets of its own, of which none has the best checkpoint's metric.
    assert trainer.test({"a": LISTED})["test_a_loss"] == mean(ROWS[:9])
    logged = trainer.metrics[1]
    assert {name: logged[name] for name in found} == found
    best = best_of(tmp_path / "run/checkpoints")
    assert best is not None
    assert (best.metric, best.value) == ("eval_de_loss", found["eval_de_loss"])


PAIRS = {"chosen": {"inputs": ROWS}, "rejected": {"inputs": ROWS}}


@pytest.mark.parametrize(
    ("data", "trained", "names"),
    [
        ({"inputs": ROWS}, TRAINED, None),
        (PAIRS, PAIRS, None),
        (PAIRS, TRAINED, ["chosen", "rejected"]),
        ({"a": (ROWS, ROWS), "b": (ROWS, ROWS)}, (ROWS, ROWS), ["a", "b"]),
        ({"a": LISTED}, TRAINED, ["a"]),
        ((ROWS, ROWS), TRAINED, None),
        (None, TRAINED, None),
    ],
)
def test_a_dict_is_several_sets_unless_training_examples_have_its_keys(
    data, trained, names
):
    def training_data():
        return as_dataset(trained, 0, repeat=True)

    found = as_sets(data, 0, training_data)
    assert (sorted(found) if isinstance(found, dict) else None) == names


@pytest.mark.parametrize(
    ("given", "config", "said"),
    [
        ({"validation_data": {"a/b": LISTED}}, {}, "validation set called 'a/b': name"),
        ({"validation_data": {"a": None}}, {}, "returned None for validation set 'a'"),
        ({"validation_data": {"ema": LISTED}}, {}, "two metrics of evaluations"),
        ({"validation_data": {"a": LISTED, "a_b": LISTED}},
         {"checkpoint.best": "eval_c_loss", "checkpoint.every": 1},
         "have eval_loss, eval_size, eval_a_loss, eval_a_size, eval_a_b_loss"),
        ({"train_data": {"a": LISTED, "b": iter(LISTED)}}, {},
         "returned a dict of 'a', 'b', which are no arrays"),
        ({"validation_data": {"inputs": [1, 2]}}, {}, "dict of 'inputs', which are no"),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_named_are_refused_before_the_first_step(
    given, config, said, tmp_path
):
    trainer = make(tmp_path, config={"steps": 1, "eval_every": 1} | config, **given)
    with pytest.raises(UserError, match=said):
        trainer.fit()
    assert not (tmp_path / "run/metrics.jsonl").exists()

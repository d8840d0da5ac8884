"""train/preference.py: runs from pairs to adapters, resumed, and kept references."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jshard
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.system.errors import Preempted
from jshard.training.precomputed import FILE, Precomputed, digests_of
from jshard.training.trainer import Trainer, fit_since
from resumable import read_metrics
from tiny_llama import make_llama

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.usefixtures("compiled_once")

KEYS = {
    "steps": 6,
    "batch_size": 8,
    "log_every": 1,
    "eval_every": 6,
    "checkpoint.every": 6,
    "data.sequence_length": 24,
    "data.validation_fraction": 0.2,  # 3 of 16 pairs: a batch with padding
    "lora.rank": 2,
    "lora.base_dtype": "float32",
    "optimizer.learning_rate": 1e-2,
    "policy.precision.compute": "float32",
    "policy.min_shard_elements": 0,
    "sample.length": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "adapters": {"policy.accumulate": 1},
    "nf4": {"policy.precision.base": "nf4"},
    "kept": {"preference.keep_reference": True},
    "whole": {"preference.keep_reference": True, "lora.rank": 0},
    "orpo": {"preference.loss": "orpo", "lora.rank": 0},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rng, words = np.random.default_rng(0), "the quick brown fox jumps".split()
    say = lambda n: " ".join(rng.choice(words, n))
    records = [
        {"prompt": f"{say(2)} ", "chosen": say(3), "rejected": f"{say(3)} dog"}
        for _ in range(16)
    ]
    file.write_text("".join(f"{json.dumps(x)}\n" for x in records))
    return file


def train(run: Path, base: Path, pairs: Path, **keys: Any) -> Path:
    given = {
        "model.from": base,
        "checkpoint.restore": base,
        "data.path": pairs,
        "data.tokenizer": base,
    }
    with open_recipe(find_recipe("preference.py")) as recipe:
        config = make_config(recipe, KEYS | given | keys)
        trainer = Trainer(recipe, config=config, workdir=run)
        fit_since(trainer, keeps_state=False)
    return run


def stop_after(step: int, *args: Any, **keys: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jshard.training.callbacks.preemption.Preemption.requested",
            lambda self, now: now == step,
        )
        with pytest.raises(Preempted):
            train(*args, **keys)


@pytest.mark.slow  # by default, nn/test_preference's steps
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_learns_what_was_preferred(variant, base, pairs, tmp_path):
    keys = VARIANTS[variant]
    run = train(tmp_path / "run", base, pairs, **keys)
    *steps, evaluated = read_metrics(run)
    if variant != "orpo":
        assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
        assert steps[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["reward_margin"] > steps[0]["reward_margin"]
    assert 0 < evaluated["eval_reward_accuracy"] <= 1
    assert (run / FILE).exists() == ("preference.keep_reference" in keys)
    assert "Reward margin" in (run / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_resumes_bit_for_bit(variant, base, pairs, tmp_path):
    keys = VARIANTS[variant]
    whole = train(tmp_path / "whole", base, pairs, **keys)
    stop_after(3, tmp_path / "run", base, pairs, **keys)
    train(tmp_path / "run", base, pairs, **keys)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)


@pytest.mark.slow
def test_a_run_on_a_stream_resumes_bit_for_bit(base, pairs, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="needs jshard[datasets]")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    keys = {
        "data.path": "",
        "data.dataset": str(pairs.parent),
        "data.validation_rows": 3,
        "data.shuffle_rows": 5,
    }
    whole = train(tmp_path / "whole", base, pairs, **keys)
    stop_after(3, tmp_path / "run", base, pairs, **keys)
    train(tmp_path / "run", base, pairs, **keys)
    assert read_metrics(tmp_path / "run") == read_metrics(whole)
    assert "eval_reward_accuracy" in read_metrics(whole)[-1]
    kept = keys | {"preference.keep_reference": True}
    assert train(tmp_path / "kept", base, pairs, **kept)


@pytest.mark.slow
def test_an_evaluation_counts_every_pair_once(base, pairs, tmp_path):
    keys = {"steps": 1, "eval_every": 1, "optimizer.learning_rate": 0.0}
    evaluated = [
        read_metrics(train(tmp_path / str(size), base, pairs, batch_size=size, **keys))
        for size in (8, 16)  # with five and 13 copies of the last of three pairs
    ]
    assert evaluated[0][-1] == pytest.approx(evaluated[1][-1], rel=1e-4, abs=1e-5)
    assert "eval_log_prob_chosen" in evaluated[0][-1]


@pytest.mark.slow
def test_kept_references_are_those_of_adapters_that_are_off(base, pairs, tmp_path):
    runs = [
        train(tmp_path / name, base, pairs, **VARIANTS[name])
        for name in ("adapters", "kept")
    ]
    for one, other in zip(*map(read_metrics, runs), strict=True):
        for line in (one, other):  # a tie at the first step
            line.pop("reward_accuracy", None)
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_another_base_other_pairs_and_a_lost_reference_are_named(base, pairs, tmp_path):
    own, data = shutil.copytree(base, tmp_path / "base"), tmp_path / "pairs.jsonl"
    data.write_bytes(pairs.read_bytes())
    kept = VARIANTS["kept"]
    stop_after(3, tmp_path / "run", own, data, **kept)
    data.write_text(data.read_text().replace("dog", "fox"))
    with pytest.raises(jshard.UserError, match="has more steps now; start it in a new"):
        train(tmp_path / "run", own, data, **kept)
    data.write_bytes(pairs.read_bytes())
    content = (tmp_path / "run" / FILE).read_bytes()
    (tmp_path / "run" / FILE).write_bytes(content[:100])
    with pytest.raises(jshard.UserError, match=r"npz: cannot be read .*put it back"):
        train(tmp_path / "run", own, data, **kept)
    (tmp_path / "run" / FILE).write_bytes(content)
    make_llama(own, seed=1)
    with pytest.raises(jshard.UserError, match="was trained beside other frozen param"):
        train(tmp_path / "run", own, data, **kept)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora.rank": 0}, r"a second model: set preference\.keep_reference=True"),
        (
            {"preference.loss": "orpo", "preference.label_smoothing": 0.1},
            r"preference\.label_smoothing is for losses with a reference; leave it out",
        ),
        (
            {"preference.loss": "orpo", "preference.keep_reference": True},
            r"preference\.keep_reference is for losses with a reference",
        ),
        ({"data.path": ""}, r"data\.path.*or from data\.dataset; give one of them"),
        ({"checkpoint.adapters": "DIR"}, r"checkpoint\.adapters=DIR: the reference wo"),
    ],
)
def test_keys_that_do_not_go_together_are_an_error(
    keys, message, base, pairs, tmp_path
):
    with pytest.raises(jshard.UserError, match=message):
        train(tmp_path / "run", base, pairs, **keys)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_values_find_their_examples_in_any_order(tmp_path):
    rows = {"x": np.arange(6).reshape(3, 2), "value": np.full(3, np.nan)}
    digests = [np.frombuffer(x, np.uint8) for x in digests_of(rows, ["value"])]
    Precomputed({"value": np.arange(3.0)}, np.asarray(digests)).save(tmp_path)
    kept = Precomputed.read(tmp_path)
    order = [2, 0, 2]
    got = kept.fill({name: x[order] for name, x in rows.items()})
    np.testing.assert_array_equal(got["value"], order)
    np.testing.assert_array_equal(got["x"], rows["x"][order])
    with pytest.raises(jshard.UserError, match=r"^1 of the 3 examples of a batch were"):
        kept.fill({"x": rows["x"] + [[0], [0], [1]], "value": rows["value"]})

"""models/t5.py and its map against transformers: tiny random models, in torch."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard
from foreign_weights import load, randomize, read_tensors, store
from models import t5_huggingface
from models.t5 import T5, T5Config, position_buckets
from parity import make_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.*of the parameters are in no Stack or Unit"),
]

B, S, T, V = 8, 24, 13, 96
SIZES = {
    "vocab_size": V,
    "d_model": 32,
    "d_kv": 16,  # four heads of it are not the width
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
CASES = {
    "v1.0": {},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def transformers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        yield pytest.importorskip("transformers", reason="needs transformers")


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(S // 3, S + 1, (B, 1))
    return {
        "inputs": rng.integers(0, V, (B, S)),
        "tokens": rng.integers(0, V, (B, T)),
        "mask": np.arange(S) < lengths,
    }


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    """Writes a version's folder once."""
    torch = pytest.importorskip("torch")

    @functools.cache
    def make(case: str) -> Path:
        path = tmp_path_factory.mktemp(case)
        config = transformers.T5Config(**SIZES | CASES[case])
        model = transformers.T5ForConditionalGeneration(config)
        if case == "v1.1":  # transformers 5 ties every new head
            model.lm_head.weight = torch.nn.Parameter(torch.zeros(V, 32))
        randomize(model).save_pretrained(path)
        return path

    return make


def their_logits(transformers: Any, folder: Path, batch: dict[str, Any]) -> np.ndarray:
    torch = pytest.importorskip("torch")

    model, info = transformers.T5ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(
            input_ids=torch.tensor(batch["inputs"]),
            attention_mask=torch.tensor(batch["mask"]).int(),
            decoder_input_ids=torch.tensor(batch["tokens"]),
        ).logits.numpy()


def our_model(folder: Path) -> Any:
    content = json.loads((folder / "config.json").read_text())
    keys = t5_huggingface.read_config(content)
    model = T5(T5Config(**keys), rngs=nnx.Rngs(0))
    return load(model, read_tensors(folder), t5_huggingface.tensors(keys))


def logits(model: Any, batch: dict[str, Any]) -> jax.Array:
    return model(batch["inputs"], batch["tokens"], batch["mask"])


def check(got: Any, want: np.ndarray) -> None:
    assert np.max(np.abs(np.asarray(got) - want)) <= 1e-5 * np.max(np.abs(want))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers, folder, batch, case):
    want = their_logits(transformers, folder(case), batch)
    assert np.std(want) > 0.1
    model = our_model(folder(case))
    assert hasattr(model, "head") == (case == "v1.1")
    with jax.default_matmul_precision("highest"):
        check(nnx.jit(logits)(model, batch), want)
        for replica in (1, 2):
            fsdp = jshard.FSDP(
                make_mesh(replica, 8 // replica), jshard.Policy(min_shard_elements=0)
            )
            state = fsdp.shard(model, optax.identity())
            predict = fsdp.predict_step(logits)
            check(fsdp.unshard(predict(state, fsdp.shard_batch(batch))), want)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_transformers(
    transformers, folder, batch, case, tmp_path
):
    want = their_logits(transformers, folder(case), batch)
    model = our_model(folder(case))
    config = t5_huggingface.write_config(vars(model.config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = store(model, t5_huggingface.tensors(vars(model.config)))
    save_file(files, tmp_path / "model.safetensors", {"format": "pt"})
    originals = read_tensors(folder(case))
    assert originals.keys() == files.keys()
    for name, original in originals.items():
        assert original.tobytes() == files[name].tobytes()
    np.testing.assert_array_equal(their_logits(transformers, tmp_path, batch), want)
    content = json.loads((folder(case) / "config.json").read_text())
    read = t5_huggingface.read_config
    assert read(config) == read(content)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(transformers, folder, batch, case):
    torch = pytest.importorskip("torch")

    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder(case))
    theirs.generation_config.eos_token_id = None
    want = theirs.generate(
        torch.tensor(batch["inputs"]),
        attention_mask=torch.tensor(batch["mask"]).int(),
        max_new_tokens=6,
        do_sample=False,
        use_cache=False,  # transformers 5.23 takes the encoder's number of layers
    )
    model = our_model(folder(case))
    model.eval()
    got = model.greedy(batch["inputs"], 6, batch["mask"])
    np.testing.assert_array_equal(got, want[:, 1:].numpy())


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (12, 100)])
def test_classes_of_positions_are_those_of_transformers(
    transformers, bidirectional, buckets, distance
):
    torch = pytest.importorskip("torch")
    attention = transformers.models.t5.modeling_t5.T5Attention

    relative = torch.arange(400)[None, :] - torch.arange(400)[:, None]
    want = attention._relative_position_bucket(
        relative, bidirectional, buckets, distance
    )
    got = position_buckets(
        400,
        400,
        bidirectional=bidirectional,
        buckets=buckets,
        max_distance=distance,
    )
    np.testing.assert_array_equal(got, want.numpy())

"""models/t5.py and its map against transformers: tiny random models, in torch."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from foreign_weights import check_logits, load, randomize, read_tensors, write_again
from jshard.inference.generation import Generator, Sampling
from jshard.models import t5_huggingface
from jshard.models.t5 import T5, T5Config
from jshard.models.t5_attention import position_buckets
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
    model = filled(lambda: T5(T5Config(**keys), rngs=nnx.Rngs(0)))
    return load(model, read_tensors(folder), t5_huggingface.tensors(keys))


def logits(model: Any, batch: dict[str, Any]) -> jax.Array:
    return model(batch["inputs"], batch["tokens"], batch["mask"])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(transformers, folder, batch, case):
    want = their_logits(transformers, folder(case), batch)
    model = our_model(folder(case))
    assert hasattr(model, "head") == (case == "v1.1")
    check_logits(model, logits, batch, want)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_loads_in_transformers(
    transformers, folder, batch, case, tmp_path
):
    want = their_logits(transformers, folder(case), batch)
    model = our_model(folder(case))
    write_again(model, t5_huggingface, folder(case), tmp_path)
    np.testing.assert_array_equal(their_logits(transformers, tmp_path, batch), want)


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    transformers, folder, batch, case, eos
):
    torch = pytest.importorskip("torch")

    theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder(case))

    def generate(eos_token_id: int | None) -> np.ndarray:
        theirs.generation_config.eos_token_id = eos_token_id
        tokens = theirs.generate(
            torch.tensor(batch["inputs"]),
            attention_mask=torch.tensor(batch["mask"]).int(),
            max_new_tokens=20,
            do_sample=False,
            use_cache=False,  # transformers 5.23 takes the encoder's number of layers
        )
        return tokens[:, 1:].numpy()

    want, stop = generate(None), []
    if eos:  # a row's first token ends it, and later ones others
        stop = [int(want[0, 0])]
        want = generate(stop[0])
    rows = [row.tolist() for row in want]
    ends = [row.index(stop[0]) if stop and stop[0] in row else 20 for row in rows]
    prompts = [x[m] for x, m in zip(batch["inputs"], batch["mask"], strict=True)]
    model = our_model(folder(case))
    fsdp = jshard.FSDP(make_mesh(2, 4), jshard.Policy(min_shard_elements=0))
    sharded = Generator.sharded(fsdp, fsdp.from_model(model, optax.identity()))
    for generator in (Generator(model), Generator(model, jax.devices()[:3]), sharded):
        got = generator(prompts, length=20, sampling=Sampling(0), stop_tokens=stop)
        assert got == [row[:end] for row, end in zip(rows, ends, strict=True)]


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

"""An encoder-decoder generates with caches what full forward passes say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.inference.generation import Generator, Sampling, answer_inputs
from jshard.inference.generation.unstacked import without_stacks
from jshard.models.t5 import T5, T5Config

VOCAB, START, LENGTH = 50, 3, 12
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [20, 30, 40], [1, 2, 3, 4, 5]]
STYLES = {"v1.0": {}, "v1.1": {"gated": True, "tied": False}}


def make_model(style: str = "v1.1", **changes: Any) -> T5:
    """A model with large weights, whose greedy texts do not repeat one token."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
        "head_width": 8,
        "width": 16,
        "hidden": 24,
        "buckets": 8,
        "max_distance": 12,
        "start_token": START,
    }
    config = T5Config(**sizes | STYLES[style] | changes)
    return filled(lambda: T5(config, rngs=nnx.Rngs(1)), spread=1.0)


@functools.cache
def generator(style: str = "v1.1") -> Generator:
    """One for all tests that train and change nothing."""
    return Generator(make_model(style))


@jax.jit
def logits_of(model, inputs, tokens, mask=None):
    return model(inputs, tokens, mask)


def greedy(model: T5, inputs: list[int], length: int) -> list[int]:
    """Generates by full forward passes."""
    tokens = [START]
    read = np.zeros((1, 8), np.int32)
    read[0, : len(inputs)] = inputs
    mask = np.arange(8)[None] < len(inputs)  # one program for all lengths
    for _ in range(length):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = logits_of(model, read, padded, mask)
        tokens.append(int(jnp.argmax(logits[0, len(tokens) - 1])))
    return tokens[1:]


@pytest.mark.slow  # by default a test below compares what is decoded
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_decoding_gives_the_logits_of_the_full_forward(x64, style, stacked):
    model: Any = make_model(style, dtype=jnp.float64, param_dtype=jnp.float64)
    rng = np.random.default_rng(0)
    inputs, tokens = rng.integers(0, VOCAB, (4, 11)), rng.integers(0, VOCAB, (4, 21))
    mask = np.arange(11) < [[11], [3], [0], [7]]  # one has nothing to read
    want = logits_of(model, inputs, tokens, mask)
    model = model if stacked else without_stacks(model)
    decode = jax.jit(lambda model, *args: model.decode(*args))
    cache, got = jax.jit(lambda model: model.encode(inputs, mask, 24))(model), []
    for start, stop in [(0, 1), (1, 2), (2, 11), (11, 12), (12, 21)]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (4, stop - start))
        logits, cache = decode(model, tokens[:, start:stop], positions, cache)
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.quick("v1.1")
@pytest.mark.parametrize("style", STYLES)
def test_a_batch_gives_each_prompt_what_it_gets_from_full_forwards(style):
    model = make_model(style)
    together = generator(style)(PROMPTS, length=LENGTH, sampling=Sampling(0))
    assert together == [greedy(model, prompt, LENGTH) for prompt in PROMPTS]
    assert len(set(together[0])) > 2


@pytest.mark.slow
@pytest.mark.parametrize(  # for four prompts
    ("devices", "style"), [(1, "v1.0"), (2, "v1.1"), (3, "v1.0"), (8, "v1.1")]
)
def test_sharded_and_divided_prompts_give_the_same(devices, style):
    used = jax.devices()[:devices]
    options: dict[str, Any] = {
        "length": 9,
        "sampling": Sampling(0.9, top_k=20),
        "seed": 5,
    }
    want = Generator(make_model(style))(PROMPTS, **options)
    mesh = jshard.make_mesh(devices=used)
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    sharded = Generator.sharded(
        fsdp, fsdp.from_model(make_model(style), optax.identity())
    )
    assert sharded(PROMPTS, **options) == want
    assert Generator(make_model(style), used)(PROMPTS, **options) == want


@pytest.mark.slow  # test_generation.py has a recipe's sample
def test_a_recipes_sample_is_that_of_the_generator():
    model = make_model()
    inputs, mask = np.zeros((4, 9), np.int32), np.zeros((4, 9), bool)
    for row, prompt in enumerate(PROMPTS):
        inputs[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    batch = {"inputs": inputs, "mask": mask, "seed": np.arange(4, dtype=np.uint32)}
    tokens = jax.jit(lambda m, b: answer_inputs(m, b, length=LENGTH))(model, batch)
    want = generator()(PROMPTS, length=LENGTH, sampling=Sampling(0))
    assert tokens.tolist() == want


@pytest.mark.slow  # test_generation.py has one
@pytest.mark.parametrize("place", [0, 4])
def test_a_stop_token_ends_its_row_alone(place):
    options: dict[str, Any] = {"length": LENGTH, "sampling": Sampling(0)}
    whole = generator()(PROMPTS, **options)
    stop = whole[0][place]
    stopped = generator()(PROMPTS, **options, stop_tokens=[stop])
    for row, full in zip(stopped, whole, strict=True):
        assert row == full[: full.index(stop) if stop in full else None]
    assert len(stopped[0]) <= place


@pytest.mark.slow
def test_the_caches_are_updated_in_place():
    model: Any = make_model(num_decoder_layers=8)
    mask = np.ones((4, 4096), bool)
    cache = jax.eval_shape(lambda: model.encode(mask.astype(np.int32), mask, 4096))
    one = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    for stacked in (True, False):
        decode = jax.jit(lambda model, *args: model.decode(*args), donate_argnums=3)
        lowered = decode.lower(
            model if stacked else without_stacks(model), one, one, cache
        )
        memory: Any = lowered.compile().memory_analysis()
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        assert memory.alias_size_in_bytes >= size
        # Layers that are not stacked may have their parts of it sliced at once.
        assert memory.temp_size_in_bytes < size / (2 if stacked else 1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there are no prompts"),
        ([[1], []], "prompt 2 of 2 is empty"),
        ([[1, 50]], "prompt 1 of 1 has token 50, but .* vocabulary has 50"),
    ],
)
def test_prompts_that_cannot_be_answered_are_a_users_error(prompts, message):
    with pytest.raises(jshard.UserError, match=message):
        generator()(prompts)

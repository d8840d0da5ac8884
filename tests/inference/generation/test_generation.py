"""Decoding with a cache: the same tokens as full forward passes, on any mesh."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from jshard.inference.generation import Generator, Sampling, continue_prompts
from jshard.inference.generation.unstacked import Layers, without_stacks
from jshard.inference.generation.weight_placement import replicated
from jshard.inference.generation.weights_first import larger_first
from jshard.models.gpt import GPT, GPTConfig

VOCAB, CONTEXT = 50, 32
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [20, 30, 40], [1, 2, 3, 4, 5]]


def config(**changes: Any) -> GPTConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "sequence_length": CONTEXT,
        "width": 16,
    }
    sizes |= {"num_layers": 2, "num_heads": 2}
    return GPTConfig(**sizes | changes)


def make_model(**changes) -> GPT:
    """A model with large weights, whose greedy texts do not repeat one token."""
    return filled(lambda: GPT(config(**changes), rngs=nnx.Rngs(0)))


@functools.cache
def one_generator() -> Generator:
    """One for all tests that train and change nothing."""
    return Generator(make_model())


@jax.jit
def logits_of(model, tokens):
    return model(tokens)


def greedy(model, prompt, length: int) -> list[int]:
    """Continues a prompt by full forward passes."""
    tokens = list(prompt)
    for _ in range(length):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(logits_of(model, padded))
        tokens.append(int(np.argmax(logits[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


# By default a test below compares tokens, and test_kv_cache.py numbers.
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_decoding_gives_the_logits_of_the_full_forward(x64, tied):
    # JAX's own attention has a softmax in float32.
    exact = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    model = make_model(tied=tied, attention="blockwise", **exact)
    tokens = jax.random.randint(jax.random.key(0), (4, CONTEXT), 0, VOCAB)
    want = logits_of(model, tokens)
    cache = model.init_cache(4, CONTEXT)
    decode = jax.jit(lambda model, *args: model.decode(*args))
    got = []
    for start, stop in [(0, 15), (15, 16), (16, 17), (17, CONTEXT)]:
        positions = jnp.broadcast_to(jnp.arange(start, stop), (4, stop - start))
        logits, cache = decode(model, tokens[:, start:stop], positions, cache)
        got.append(logits)
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-9, atol=1e-9)


@pytest.mark.quick("True")
@pytest.mark.parametrize("stacked", [True, False])
def test_the_cache_is_updated_in_place(stacked):
    """Temporary memory holds a layer's part of the cache, not the cache."""
    model: Any = make_model(num_layers=8)
    cache = jax.eval_shape(lambda: model.init_cache(4, 4096))
    if not stacked:
        model = without_stacks(model)
    one = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    decode = jax.jit(lambda model, *args: model.decode(*args), donate_argnums=3)
    memory: Any = decode.lower(model, one, one, cache).compile().memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2


@pytest.mark.quick("tokens0", "tokens3")
@pytest.mark.parametrize("tokens", [(3,), (4, 1), (2, 5), (64, 2)])
def test_products_whose_larger_operand_is_first_are_the_same(tokens):
    x = jax.random.normal(jax.random.key(0), (*tokens, 6))
    kernel = jax.random.normal(jax.random.key(1), (6, 10))
    dimensions = ((x.ndim - 1,), (0,)), ((), ())
    got = larger_first(x, kernel, dimensions)
    np.testing.assert_allclose(got, x @ kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # by default cpu/test_weight_products.py
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_the_first_operands_of_products_on_cpus(tied):
    """As second ones XLA would pack them anew for each token."""
    model = make_model(tied=tied)
    placement = replicated(model, jax.devices()[:1])
    cache = jax.eval_shape(lambda: model.init_cache(4, CONTEXT))
    one = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    step: Any = placement.compile(lambda model, rows: model.decode(*rows), False)
    lowered = step.lower(placement.weights, (one, one, cache))
    program = lowered.compile().as_text()
    products = re.findall(r"\[(\d+),4\]\S* dot\(.*lhs_contracting_dims={1}", program)
    assert sorted(map(int, products)) == sorted([48, 16, 64, 16] * 2 + [VOCAB])


def test_a_batch_gives_each_prompt_what_it_gets_alone_and_from_full_forwards():
    model, generator = make_model(), one_generator()
    together = generator(PROMPTS, length=10, sampling=Sampling(0))
    assert together == [greedy(model, prompt, 10) for prompt in PROMPTS]
    alone = [generator([p], length=10, sampling=Sampling(0))[0] for p in PROMPTS[:2]]
    assert together[:2] == alone
    assert jshard.generate(generator, PROMPTS, length=10, temperature=0) == together


@pytest.mark.slow  # test_sharded_generation.py shards
@pytest.mark.parametrize("how", ["sharded", "divided"])
def test_sharded_and_divided_prompts_give_the_same(how):
    options = {"length": 10, "sampling": Sampling(0.8), "seed": 4}
    if how == "sharded":
        fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=0))
        state = fsdp.from_model(make_model(), optax.identity())
        generator = Generator.sharded(fsdp, state)
    else:
        generator = Generator(make_model(), jax.devices()[:3])
    assert generator(PROMPTS, **options) == one_generator()(PROMPTS, **options)


def test_a_recipes_sample_is_that_of_the_generator():
    model = make_model()
    # As long as the longest of PROMPTS, so that one program reads both.
    rows = np.random.default_rng(0).integers(0, VOCAB, (4, 8)).tolist()
    prompts = {"tokens": np.array(rows), "seed": np.arange(4, 8)}
    # On a mesh, as recipes do.
    mesh = jshard.make_mesh(devices=jax.devices()[:4])
    fsdp = jshard.FSDP(mesh, jshard.Policy(min_shard_elements=0))
    sample = fsdp.predict_step(lambda m, p: continue_prompts(m, p, length=10))
    state = fsdp.from_model(model, optax.identity())
    tokens = np.asarray(sample(state, fsdp.shard_batch(prompts)))
    np.testing.assert_array_equal(tokens[:, :8], prompts["tokens"])
    want = one_generator()(rows, length=10, sampling=Sampling(0.8), seed=4)
    assert tokens[:, 8:].tolist() == want


def test_a_stop_token_ends_its_row_alone():
    generator = one_generator()
    options = {"length": 10, "sampling": Sampling(0)}
    whole = generator(PROMPTS, **options)
    stop = whole[0][3]
    stopped = generator(PROMPTS, **options, stop_tokens=[stop])
    for row, full in zip(stopped, whole, strict=True):
        assert row == full[: full.index(stop) if stop in full else None]
    assert len(stopped[0]) < 10


@pytest.mark.slow
def test_long_prompts_are_read_in_parts_and_the_context_ends_a_text(monkeypatch):
    monkeypatch.setattr("jshard.inference.generation.generator._PREFILL", 4)
    model = make_model()
    prompts = [list(range(30)), [5, 6, 7]]
    texts = Generator(model)(prompts, length=6, sampling=Sampling(0))
    assert list(map(len, texts)) == [2, 6]  # positions 0 to 31
    assert texts == [greedy(model, prompts[0], 2), greedy(model, prompts[1], 6)]


def test_streaming_gives_the_same_tokens_one_at_a_time():
    generator = one_generator()
    parts = list(
        generator.stream(PROMPTS[:1], length=10, sampling=Sampling(0), chunk=1)
    )
    assert [part.shape for part in parts] == [(1, 1)] * 10
    whole = generator(PROMPTS[:1], length=10, sampling=Sampling(0))
    assert np.concatenate(parts, 1).tolist() == whole


@pytest.mark.slow
def test_a_tokenizer_makes_texts_of_texts():
    class Letters:
        def encode(self, text):
            return np.array([ord(c) - ord("a") for c in text])

        def decode(self, tokens):
            return "".join(chr(ord("a") + t) for t in tokens)

    (text,) = jshard.generate(
        make_model(vocab_size=26), ["abc"], length=4, tokenizer=Letters()
    )
    assert len(text) == 4
    assert text.isalpha()


def test_layers_do_what_their_stack_does():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x, y):
            return self.linear(x) + y, jnp.sum(x)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.stack = jshard.Stack(lambda rngs: Layer(rngs), 3, rngs=rngs)

    model = filled(lambda: Model(nnx.Rngs(0)))
    plain: nnx.Module = without_stacks(model)
    assert isinstance(plain.stack, Layers)  # pyright: ignore[reportAttributeAccessIssue]
    x = jnp.ones((2, 4))
    got = plain.stack(x, 1.0)  # pyright: ignore[reportAttributeAccessIssue]
    chex.assert_trees_all_close(got, model.stack(x, 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there are no prompts"),
        ([[1], []], "prompt 2 of 2 is empty"),
        ([[1] * 32], r"prompt 1 of 1 has 32 tokens, .* context of 32"),
        ([[1, 50]], "prompt 1 of 1 has token 50, but .* vocabulary has 50"),
    ],
)
def test_prompts_that_cannot_be_continued_are_a_users_error(prompts, message):
    with pytest.raises(jshard.UserError, match=message):
        one_generator()(prompts)


def test_a_model_without_a_cache_is_a_users_error():
    with pytest.raises(jshard.UserError, match="Linear has no method init_cache"):
        jshard.generate(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [[1]])

"""What a device holds, as the compiler counts it: shards, and few full layers.

``memory_analysis`` is of the program that each device runs, so its sizes are a
device's (``test_the_compiler_counts_one_device``).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hlo
import jshard
from decoder import (
    OPTIMIZERS,
    Sizes,
    loss_fn,
    lower_step,
    lower_update,
    make_decoder,
    make_fsdp,
)
from parity import every_pair

DEVICES = 8
# Wide layers and one short example a device: weights are what there is.
WIDE = Sizes(width=256, hidden=1024, vocab=64, length=4)
LAYER = 4 * 2 * WIDE.width * WIDE.hidden  # bytes of one layer's matrices
# All that a layer could keep of its forward: inputs, statistics, hidden values.
ACTIVATIONS = 4 * WIDE.length * 8 * (WIDE.width + WIDE.hidden)


def temporary(lowered: jax.stages.Lowered, **options: Any) -> int:
    """Bytes that a device needs besides arguments and results."""
    return hlo.compile(lowered, **options).memory_analysis().temp_size_in_bytes


@functools.cache
def compiled_step(
    layers: int,
    *,
    plain: bool,
    accumulate: int = 1,
    dtype: Any = jnp.float32,
    **knobs: Any,
) -> tuple[Any, Any]:
    """(what the compiler counts, the abstract state)."""
    policy = jshard.Policy(min_shard_elements=0, accumulate=accumulate, **knobs)
    fsdp = make_fsdp(policy, plain=plain)
    sizes = dataclasses.replace(WIDE, layers=layers, dtype=dtype)
    examples = DEVICES * accumulate
    lowered, state = lower_step(fsdp, sizes, plain=plain, examples=examples)
    return hlo.compile(lowered).memory_analysis(), state


def step_memory(layers: int, **options: Any) -> int:
    return compiled_step(layers, **options)[0].temp_size_in_bytes


@pytest.mark.slow  # test_closed_form.py counts so, too
def test_the_compiler_counts_one_device():
    memory, state = compiled_step(
        8,
        remat=REMATS["everything"],
        plain=False,
        accumulate=1,
        dtype=jnp.float32,
        unroll=False,
    )
    whole = sum(x.size * 4 for x in jax.tree.leaves((state.params, state.opt_state)))
    batch = 2 * 4 * WIDE.length
    # Parameters and momentum are there as shards and nothing else; a step counter.
    assert memory.argument_size_in_bytes == whole // DEVICES + batch + 4
    # And they are updated in place.
    assert memory.alias_size_in_bytes >= whole // DEVICES


REMATS = {
    "full": "full",
    "dots": "dots",
    "none": "none",
    "names": jshard.Names("hidden"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


# A bfloat16 layer casts its weights: casts, too, depend on weights alone.
@pytest.mark.slow  # test_residuals.py has what a layer keeps
@every_pair(
    remat=tuple(REMATS),
    plain=(False, True),
    accumulate=(1, 2),
    dtype=(jnp.float32, jnp.bfloat16),
    unroll=(False, True),
)
def test_no_gathered_weight_is_kept_from_forward_to_backward(case):
    case = case | {"remat": REMATS[case["remat"]]}
    four, eight = (step_memory(layers, **case) for layers in (4, 8))
    # A layer more is a shard more of gradients (two, where they are summed), and its
    # activations.
    grow = case["accumulate"] * LAYER // DEVICES + ACTIVATIONS
    # XLA:CPU drops the barriers, and casts the shards of unrolled layers all at once;
    # JAX 0.12 takes 44 KB a layer more than these casts.
    grow += case["unroll"] * LAYER // DEVICES
    assert grow < LAYER / 2
    assert (eight - four) / 4 < grow
    # At any time two layers at most are whole.
    assert eight < 2 * LAYER + 8 * grow


class Matrix(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.zeros((WIDE.width, WIDE.width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.kernel[...])


# test_closed_form.py has the memory of weights that are kept in groups.
def test_weights_that_are_not_resharded_are_kept_once():
    layers, kernel = 16, 4 * WIDE.width**2
    policy = jshard.Policy(min_shard_elements=0, reshard_after_forward=False)
    fsdp, tx = jshard.FSDP(jshard.make_mesh(), policy), optax.sgd(0.1)
    make_model = lambda rngs: nnx.Sequential(jshard.Stack(Matrix, layers, rngs=rngs))
    state = fsdp.abstract_state(make_model, tx)
    loss_fn = lambda model, x: jshard.Mean(jnp.sum(model(x)), len(x))
    x = jax.ShapeDtypeStruct((DEVICES, WIDE.width), jnp.float32)
    memory = temporary(fsdp.train_step(loss_fn, tx).lower(state, x))
    # And two more are whole at a time, kept or not, with their gradients.
    assert layers * kernel < memory < 1.5 * layers * kernel


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_weights_are_kept_when_they_are_not_resharded(plain):
    layers = 16  # of which two more are whole at a time, kept or not
    memory = step_memory(layers, reshard_after_forward=False, plain=plain)
    assert layers * LAYER < memory < 1.5 * layers * LAYER


@pytest.mark.quick("False")
@pytest.mark.parametrize("plain", [False, True])
def test_evaluation_holds_two_full_layers_at_most(plain):
    fsdp = make_fsdp(jshard.Policy(min_shard_elements=0), plain=plain)
    sizes = dataclasses.replace(WIDE, layers=8)
    state = fsdp.abstract_state(make_decoder(sizes, plain=plain), optax.sgd(0.1))
    tokens = jax.ShapeDtypeStruct((DEVICES, WIDE.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    lowered = fsdp.eval_step(loss_fn).lower(state, batch)
    assert temporary(lowered) < 2 * LAYER + ACTIVATIONS


@pytest.mark.slow  # test_collectives.py counts what it gathers
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_needs_shards_and_two_full_layers(name):
    sizes = Sizes(layers=16, width=64, hidden=256, vocab=64)
    fsdp = make_fsdp(jshard.Policy(min_shard_elements=0))
    lowered, state = lower_update(fsdp, make_decoder(sizes), OPTIMIZERS[name])
    # In the order that needs least, as XLA:GPU looks for; XLA:CPU prefers parallelism.
    memory = temporary(
        lowered, xla_cpu_scheduler_type="CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    )
    params = 4 * sum(x.size for x in jax.tree.leaves(state.params))
    layer = 4 * 2 * sizes.width * sizes.hidden
    # Shards of clipped gradients, of updates, and of one value in between.
    assert memory < 3 * params / DEVICES + 2 * layer


def init_memory(make_model: Any, *, plain: bool = False) -> tuple[int, int]:
    """Bytes of temporaries and of results on a device when a state is made."""
    fsdp = make_fsdp(jshard.Policy(min_shard_elements=0), plain=plain)
    optimizer = optax.adamw(1e-3)
    lowered = jax.jit(lambda seed: fsdp.init(make_model, optimizer, seed)).lower(0)
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes, memory.output_size_in_bytes


def test_initial_values_are_made_as_shards():
    sizes = dataclasses.replace(WIDE, layers=16, vocab=12 * WIDE.width)
    temp, state = init_memory(make_decoder(sizes))
    # Parameters and two moments, as shards. The embedding and the head are large, too.
    large = 4 * sizes.vocab * sizes.width
    assert large > LAYER
    whole = 16 * LAYER + 2 * large
    assert state == pytest.approx(3 * whole / DEVICES, rel=0.01)
    assert temp < LAYER


@pytest.mark.slow
def test_initial_values_of_a_plain_list_are_made_as_shards():
    few, many = (
        init_memory(make_decoder(sizes, plain=True), plain=True)[0]
        for sizes in (dataclasses.replace(WIDE, layers=layers) for layers in (4, 12))
    )
    assert (many - few) / 8 < LAYER / 4  # two shards


@pytest.mark.slow  # by default beside layers, above
def test_a_large_embedding_is_made_as_shards():
    sizes = dataclasses.replace(WIDE, layers=1, vocab=64 * WIDE.width)
    temp, _ = init_memory(make_decoder(sizes))
    # A few shards of the embedding and of the head, not one of them whole.
    assert temp < 4 * sizes.vocab * sizes.width


def test_an_initialiser_of_whole_matrices_is_given_one_layer_at_a_time():
    orthogonal = nnx.initializers.orthogonal()

    def layer(rngs: nnx.Rngs) -> nnx.Module:
        return nnx.Linear(WIDE.width, WIDE.width, kernel_init=orthogonal, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, layers: int, rngs: nnx.Rngs):
            self.layers = jshard.Stack(layer, layers, rngs=rngs)

    few, many = (
        init_memory(lambda rngs, n=layers: Model(n, rngs))[0] for layers in (4, 12)
    )
    assert many < 1.1 * few


def test_the_chunked_loss_holds_no_logits_of_a_whole_sequence():
    B, D = 4, 16

    def peak(V: int, T: int, chunk: int) -> int:
        def loss(x_BTD: jax.Array, head_DV: jax.Array) -> Any:
            targets = jnp.zeros((B, T), jnp.int32)
            weights = jnp.ones((B, T))
            loss = jshard.nn.cross_entropy(
                x_BTD, head_DV, targets, weights, chunk=chunk
            )
            return loss.total

        shapes = (B, T, D), (D, V)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return temporary(grad.lower(*args))

    def product_term(chunk: Callable[[int], int]) -> float:
        """Bytes that come with vocabulary times tokens, of those that fp32 logits are.

        What comes with either alone (the head's gradient, the features) cancels.
        """
        V, T = 2048, 128
        long = peak(2 * V, 2 * T, chunk(2 * T)) - peak(V, 2 * T, chunk(2 * T))
        short = peak(2 * V, T, chunk(T)) - peak(V, T, chunk(T))
        return (long - short) / (4 * B * V * T)

    assert abs(product_term(lambda tokens: 32)) < 0.05
    assert peak(2048, 128, B * 128) > 0.9 * 4 * B * 2048 * 128  # in one chunk

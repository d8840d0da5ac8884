"""Memory follows a closed form: activations as declared, shards, few full layers.

What a device needs in all is what goes in and comes out, less what is updated in place,
and temporaries, as the compiler counts them. Layers are many (a loop costs the compiler
the same), so that a shard that is kept too often in each of them is seen.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.extend import core

import hlo
import jshard
from decoder import (
    OPTIMIZERS,
    REMATS,
    Block,
    Sizes,
    loss_fn,
    lower_step,
    make_fsdp,
    policies,
)
from parity import every_pair

DEVICES, EXAMPLES = 8, 2  # examples a device
SIZES = Sizes(layers=64, width=256, hidden=1024, vocab=72, length=8)
SLACK = 0.05
SGD = optax.sgd(0.1)  # gradients are subtracted, and nothing is kept
MOST_LAYERS = 3  # that are whole at a time: weights twice, and a gradient


def needed(lowered: jax.stages.Lowered) -> int:
    """Bytes of a device, from the start to the end of a program."""
    # In the order that needs least, as XLA:GPU looks for; XLA:CPU prefers parallelism.
    order = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    memory = hlo.compile(lowered, **order).memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@functools.cache
def one_layer() -> tuple[nnx.GraphDef, nnx.State]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Block(SIZES, nnx.Rngs(0))))
    return graphdef, params


def bytes_of(names: set[str]) -> int:
    """Of a layer's parameters, by their names in the decoder."""
    flat = nnx.to_flat_state(one_layer()[1])
    return sum(
        nbytes(variable)
        for path, variable in flat
        if ".".join(("blocks", *map(str, path))) in names
    )


def declared(remat: str) -> int:
    """Bytes that a layer keeps for its backward: residuals of a plain one.

    Less weights and what depends on them alone: those have no dimension of examples.
    """
    graphdef, params = one_layer()
    checkpoint_policies: dict[str, Any] = {
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    }
    layer = lambda params, x: nnx.merge(graphdef, params)(x)
    if remat in checkpoint_policies:
        layer = jax.checkpoint(layer, policy=checkpoint_policies[remat])
    x = jax.ShapeDtypeStruct((EXAMPLES, SIZES.length, SIZES.width), jnp.float32)
    residuals = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(layer, *args)[1]))
    kept = {v for v in residuals(params, x).jaxpr.outvars if isinstance(v, core.Var)}
    avals: list[Any] = [var.aval for var in kept]
    return nbytes([x for x in avals if x.shape[:1] == (EXAMPLES,)])


def lower(
    policy: jshard.Policy,
    *,
    plain: bool = False,
    layers: int = SIZES.layers,
    optimizer: Any = SGD,
) -> tuple[jax.stages.Lowered, jshard.TrainState]:
    return lower_step(
        make_fsdp(policy, plain=plain),
        dataclasses.replace(SIZES, layers=layers),
        plain=plain,
        examples=DEVICES * EXAMPLES * policy.accumulate,
        optimizer=optimizer,
    )


def check(
    remat: str,
    *,
    plain: bool = False,
    layers: int = SIZES.layers,
    optimizer: Any = SGD,
    moments: int = 0,
    **knobs: Any,
) -> None:
    """A step needs activations, kept weights, shards, and few full layers."""
    policy = policies(remat=REMATS[remat][0], **knobs)
    lowered, state = lower(policy, plain=plain, layers=layers, optimizer=optimizer)
    params, layer = nbytes(state.params), nbytes(one_layer()[1])
    # Parameters and gradients; with micro-batches also the sums of gradients.
    copies = 2 + (policy.accumulate > 1)
    read, group = REMATS[remat][1], policy.reshard_after_forward
    if policy.defer_scatter:
        # Whole weights, gradients, and sums of them; parameters as shards.
        held = copies * params + params // DEVICES
    elif group is True:
        held = copies * params // DEVICES
    else:
        kept = bytes_of(read) // (group or 1)
        held = copies * params // DEVICES + layers * kept
    held += moments * params // DEVICES
    least = held + layers * declared(remat)
    got = needed(lowered)
    assert got < (1 + SLACK) * (least + MOST_LAYERS * layer)
    # No more than it says, and no less. (Without a loop, gradients of a layer take the
    # place of what it kept.)
    assert plain or got > (1 - SLACK) * least


@pytest.mark.quick("names-")
@pytest.mark.parametrize(
    ("remat", "knobs"),
    [
        ("full", {}),
        ("none", {"reshard_after_forward": 2}),
        pytest.param(
            "names",
            {"reshard_after_forward": 2, "accumulate": 2},
            marks=pytest.mark.core,
        ),
        ("dots", {"reshard_after_forward": False}),
        ("full", {"accumulate": 2, "defer_scatter": True}),
    ],
    ids=str,
)
def test_a_step_needs_what_its_policy_declares_and_few_layers(remat, knobs):
    check(remat, **knobs)


@pytest.mark.parametrize(
    "prefetch", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_layers_written_out_keep_only_their_part_of_weights_kept_in_groups(prefetch):
    policy = {"unroll": True, "prefetch": prefetch}
    whole, part = (
        needed(lower(policies(reshard_after_forward=group, **policy), layers=10)[0])
        for group in (False, 8)
    )
    layer = nbytes(one_layer()[1])
    assert whole - part > (1 - SLACK) * (10 - MOST_LAYERS) * layer * 7 / 8


@pytest.mark.slow
def test_a_list_of_units_keeps_only_its_part_of_weights_kept_in_groups():
    # Nothing but a barrier makes XLA split them before the next unit gathers its own.
    check("full", plain=True, layers=10, reshard_after_forward=8)


@pytest.mark.slow
@every_pair(
    remat=tuple(REMATS),
    knobs=(
        *({"reshard_after_forward": reshard} for reshard in (True, False, 1, 2, 8)),
        {"defer_scatter": True},
    ),
    accumulate=(1, 2),
    plain=(False, True),
)
def test_so_it_does_for_every_pair_of_choices(case):
    plain, accumulate = case["plain"], case["accumulate"]
    layers = 10 if plain else SIZES.layers
    knobs = case["knobs"] | {"accumulate": accumulate}
    check(case["remat"], plain=plain, layers=layers, **knobs)


@pytest.mark.slow  # by default test_residuals.py reads what each layer keeps
def test_the_first_layers_alone_are_rematerialised():
    policy = policies(remat="full", first_k=48)
    lowered, state = lower(policy)
    activations = 48 * declared("full") + 16 * declared("none")
    least = 2 * nbytes(state.params) // DEVICES + activations
    layer = nbytes(one_layer()[1])
    got = needed(lowered)
    assert (1 - SLACK) * least < got < (1 + SLACK) * (least + MOST_LAYERS * layer)


@pytest.mark.slow  # by default test_memory.py has evaluation's memory
def test_a_forward_needs_shards_and_few_layers():
    _, state = lower(policies())
    tokens = jax.ShapeDtypeStruct((DEVICES * EXAMPLES, SIZES.length), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    got = needed(make_fsdp(policies()).eval_step(loss_fn).lower(state, batch))
    least, layer = nbytes(state.params) // DEVICES, nbytes(one_layer()[1])
    assert least < got < (1 + SLACK) * (least + MOST_LAYERS * layer)


# Updates in place.


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        pytest.param("adamw", 2, marks=pytest.mark.slow),
        # (For Lion XLA:CPU, not XLA:GPU, copies parameters and moments.)
        pytest.param("sgd", 1, marks=pytest.mark.slow),
    ],
)
def test_an_update_needs_no_more_than_gradients_parameters_and_moments(name, moments):
    check("full", optimizer=OPTIMIZERS[name], moments=moments)


@pytest.mark.slow  # test_ema.py has one in place
@pytest.mark.parametrize(
    "knobs",
    [
        {"first_k": 40, "remat": "dots"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param({"reshard_after_forward": 2}, marks=pytest.mark.slow),
        pytest.param({"remat": "none"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_whole_state_is_updated_in_place_and_no_stack_is_copied(knobs):
    lowered, state = lower(policies(**knobs), optimizer=OPTIMIZERS["adamw"])
    compiled = hlo.compile(lowered)
    text = compiled.as_text()
    # The state's arrays are the first parameters of the program.
    leaves = jax.tree.leaves(state)
    assert hlo.aliased(text) == set(range(len(leaves)))
    local = [x.sharding.shard_shape(x.shape) for x in leaves]
    shards = sum(
        math.prod(shape) * x.dtype.itemsize
        for shape, x in zip(local, leaves, strict=True)
    )
    assert compiled.memory_analysis().alias_size_in_bytes == shards
    matrices = {shape for shape in local if math.prod(shape) > 64 * SIZES.hidden}
    copied = hlo.copies(text)
    assert not [array for array, _ in copied if array.shape in matrices]
    # Nor does a loop copy whatever has all layers.
    looped = [array for array, times in copied if times > 1]
    assert not [x for x in looped if x.shape[:1] == (64,) and x.size > 64 * SIZES.width]

"""Attention compiled for an absent H100: which kernel runs, and what it takes."""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

import jshard
from h100 import h100s
from jshard.plan import GPUS, compile_for, hlo, tracing_for
from jshard.plan.cost.kernel_work import work
from jshard.sharding.settings.mesh import BATCH

FLASH = {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
TOKENS = 4096


def compiled(*, width: int = 128, ids: bool = False, **options: Any) -> Any:
    """The gradients of a call with four heads of queries and two of keys."""
    mesh = h100s(1)
    sharding = NamedSharding(mesh.abstract_mesh, BATCH)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def grads(q, kv, ids_BT):
        more = {"segment_ids_BT": ids_BT} if ids else {}

        def loss(q, kv):
            out = jshard.nn.dot_product_attention(
                q, kv, kv, is_causal=True, **options, **more
            )
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(q, kv)

    run = jax.shard_map(
        grads,
        mesh=mesh.abstract_mesh,
        in_specs=BATCH,
        out_specs=BATCH,
        check_vma=False,
    )
    inputs = (
        array(1, TOKENS, 4, width),
        array(1, TOKENS, 2, width),
        array(1, TOKENS, dtype=jnp.int32),
    )
    with tracing_for(GPUS["h100"]):
        traced = jax.jit(run).trace(*inputs)
    return compile_for(mesh, traced)


def cudnn_calls(program: Any) -> dict[str, int]:
    found = re.findall(r'custom_call_target="(__cudnn[^"]*)"', program.as_text())
    return collections.Counter(found)


def flops(program: Any) -> dict[str, float]:
    """FLOPs that the plan counts for each call of cuDNN."""
    module = hlo.parse(program.as_text())
    return {
        x.target: work(module, module.entry, x).flops
        for x in module.entry.instructions
        if x.target.startswith("__cudnn")
    }


@pytest.mark.h100
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.1, "width": 256},
        {"window": 512},
        {"ids": True, "max_segments": 16},
        {"ids": True, "max_segments": 16, "window": 512, "width": 64},
    ],
)
def test_what_cudnn_can_do_is_one_call_forward_and_one_backward(options):
    program = compiled(**options)
    assert cudnn_calls(program) == FLASH
    # Each of the 4 heads, 2 products forward and 5 backward, of the pairs in the mask.
    window = options.get("window", TOKENS)
    pairs = window * (TOKENS - window / 2)
    product = 2 * 4 * pairs * options.get("width", 128)
    assert sorted(flops(program).values()) == [2 * product, 5 * product]


@pytest.mark.h100
@pytest.mark.parametrize("options", [{"soft_cap": 50.0}, {"ids": True}])
def test_blocks_need_no_call_and_a_fraction_of_the_memory(options):
    with pytest.warns(UserWarning, match="block by block"):
        program = compiled(**options)
    assert not cudnn_calls(program)
    quadratic = compiled(implementation="xla")
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < quadratic.memory_analysis().temp_size_in_bytes / 2

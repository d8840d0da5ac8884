"""Decoding over shards: layers are gathered ahead, and tokens are those of one device.

XLA:CPU runs nothing beside a gather, so that here the policy asks for what is the
default on GPUs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from test_generation import PROMPTS, one_generator
from test_generation import make_model as small_model

import hlo
import jshard
from h100 import h100s
from jshard.inference.generation import Generator, Sampling
from jshard.inference.generation.decoding import Rows, decode_steps
from jshard.inference.generation.weight_placement import sharded
from jshard.models.gpt import GPT, GPTConfig
from jshard.plan import hlo as programs
from jshard.plan import tracing_for
from jshard.plan.cost.kernel_work import work
from jshard.plan.fit.hardware import GPUS

LAYERS, TOKENS, SLOTS = 4, 3, 4096


def make_model(rngs: nnx.Rngs, **changes: Any) -> GPT:
    sizes: dict[str, Any] = {"vocab_size": 48, "sequence_length": 32, "width": 24}
    sizes |= {"num_layers": LAYERS, "num_heads": 2}
    return GPT(GPTConfig(**sizes | changes), rngs=rngs)


def policy(prefetch: bool | None = True) -> jshard.Policy:
    return jshard.Policy(min_shard_elements=0, prefetch=prefetch)


def lowered(
    mesh: Any, prefetch: bool | None, slots: int = 8, each: int = 1, **changes: Any
) -> Any:
    """A program that decodes ``TOKENS`` tokens in ``each`` rows a device."""
    fsdp = jshard.FSDP(mesh, policy(prefetch))
    make = functools.partial(make_model, **changes)
    placed = sharded(fsdp, fsdp.abstract_state(make, optax.identity()))
    decode = functools.partial(decode_steps, count=TOKENS, sampling=Sampling(0))

    def on_mesh(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed.sharding)

    count = each * placed.devices
    cache = jax.eval_shape(lambda: placed.model.init_cache(count, slots))
    one = jnp.zeros(count, jnp.int32)
    rows = jax.tree.map(on_mesh, Rows(one, one, one, one.astype(jnp.uint32), cache))
    step = placed.compile(decode, True)
    return step.lower(placed.weights, rows)  # type: ignore[attr-defined]


@functools.cache
def compiled(prefetch: bool) -> Any:
    """A program with room for many tokens."""
    return hlo.compile(lowered(jshard.make_mesh(), prefetch, SLOTS))


def layer_loops(text: str) -> list[tuple[Any, Any]]:
    """The bodies of a program's loops over layers, inside that over tokens."""
    module = programs.parse(text)
    bodies = [
        module.body(x)
        for computation in module.computations.values()
        for x in computation.instructions
        if x.opcode == "while"
    ]
    opcodes = [
        {x.opcode.removesuffix("-start") for x in body.instructions} for body in bodies
    ]
    return [
        (module, body)
        for body, inside in zip(bodies, opcodes, strict=True)
        if "all-gather" in inside and "while" not in inside
    ]


def products_of_gathers(module: Any, body: Any) -> tuple[int, int]:
    """How many products a loop has, and how many of them read what it gathers."""
    products = {x.name for x in body.instructions if work(module, body, x).flops}
    reached, waiting = set(), [x for x in body.instructions if "gather" in x.opcode]
    while waiting:
        for user in body.users(waiting.pop().name):
            if user.name not in reached:
                reached.add(user.name)
                waiting.append(user)
    return len(products), len(products & reached)


@pytest.mark.quick("2")
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_tokens_are_those_of_whole_weights_bit_for_bit(devices):
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:devices]), policy())
    state = fsdp.from_model(small_model(), optax.identity())
    options = {"length": 10, "sampling": Sampling(0.8), "seed": 4}  # as there
    want = one_generator()(PROMPTS, **options)
    assert Generator.sharded(fsdp, state)(PROMPTS, **options) == want


@pytest.mark.quick("False")
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_layer_computes_with_what_was_gathered_beside_the_one_before(prefetch):
    text = compiled(prefetch).as_text()
    (loop,) = layer_loops(text)
    products, late = products_of_gathers(*loop)
    assert products >= 6
    assert (late == 0) == prefetch
    gathers = [c for c in hlo.collectives(text) if "/layers/" in c.source]
    # Each token gathers each of the twelve parameters of each layer once.
    assert sum(c.times for c in gathers) == TOKENS * LAYERS * 12


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_cache_is_updated_in_place(prefetch):
    memory = compiled(prefetch).memory_analysis()
    size = 2 * LAYERS * SLOTS * 24 * 4  # keys and values of a device's row
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 2


@pytest.mark.h100
def test_gpus_compute_beside_every_gather_of_a_layer():
    sizes = {"width": 1024, "num_heads": 8, "num_layers": 8, "vocab_size": 8192}
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    with tracing_for(GPUS["h100"]):
        program = lowered(h100s(8), None, 512, 32, **sizes, **dtypes).compile()
    # XLA unrolls both loops by two, so that there are several copies of the inner one.
    loops = layer_loops(program.as_text())
    assert loops
    for module, body in loops:
        order = {x.name: i for i, x in enumerate(body.instructions)}
        products = [
            order[x.name] for x in body.instructions if work(module, body, x).flops
        ]
        starts = [x for x in body.instructions if x.opcode == "all-gather-start"]
        assert starts
        for start in starts:
            (done,) = body.users(start.name)
            between = range(order[start.name], order[done.name])
            assert any(i in between for i in products), f"nothing beside {start.name}"


@pytest.mark.parametrize("is_sharded", [True, False])
def test_parts_come_within_an_explicit_mesh_of_the_callers_which_stays_set(is_sharded):
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:2]), policy())
    state = fsdp.from_model(small_model(), optax.identity())
    options: dict[str, Any] = {"length": 5, "sampling": Sampling(0), "chunk": 2}
    want = [part.tolist() for part in one_generator().stream(PROMPTS, **options)]
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        whole = lambda: Generator(small_model())
        generator = Generator.sharded(fsdp, state) if is_sharded else whole()
        got = []
        for part in generator.stream(PROMPTS, **options):
            got.append(part.tolist())
            assert jax.sharding.get_mesh() == mesh
    assert got == want

"""Llama steps compiled for absent GPUs, by jshard and by GSPMD.

``compile_row(Row(...))`` gives the bytes of one device's memory. Both systems get the
same recipe: model, attention, optimizer, dtypes (bf16 compute and wire, fp32 parameters
and moments), one sequence a GPU.
"""

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

import gspmd
import jshard
from gspmd_experts import use_dropping
from gspmd_float8 import use_float8
from jshard.plan import compile_for, devices, hlo, tracing_for
from jshard.plan.cost.streams import COLLECTIVES
from jshard.plan.cost.timeline import replay
from jshard.plan.cost.traffic import Traffic, count
from jshard.plan.fit.hardware import STATED, Constants
from jshard.plan.topology import parse

# Of jshard's Policy, as the Llama recipes up to 70B have it.
UNROLLED = (("unroll", True),)
STRATEGIES = ("zero3", "zero2", "zero1", "hybrid", "ddp")


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled program.

    Attributes:
      system: "jshard" or "gspmd".
      topology: as for ``jshard.plan.devices``.
      strategy: of ``STRATEGIES``.
      remat: "full", "dots" or "none".
      attention: "cudnn" (flash attention) or "xla" (scores in memory).
      options: of ``gspmd.OPTIONS``, besides those that jshard gives its own steps.
      recipe: a file in ``train/``.
      layers: instead of the recipe's.
      batch: sequences a GPU.
      rules: GSPMD's, "maxtext" (the default) or "first".
      model: further settings of the recipe's model, as (name, value) pairs.
      policy: further settings of jshard's Policy, as (name, value) pairs.
      form: further settings of ``gspmd.Form``, as (name, value) pairs.
      fsdp: devices that share a copy of the weights, with "hybrid"; None is 8.
      products: of jshard's Precision; GSPMD's are in bfloat16, or in "float8" as
        MaxText has them.
      expert: devices that share the experts, with "hybrid" and GSPMD.
    """

    system: str = "jshard"
    topology: str = "h100:8"
    strategy: str = "zero3"
    remat: str = "full"
    attention: str = "cudnn"
    options: str = "default"
    recipe: str = "llama:2-7b"
    layers: int | None = None
    batch: int = 1
    rules: str | None = None
    model: tuple[tuple[str, Any], ...] = ()
    policy: tuple[tuple[str, Any], ...] = ()
    form: tuple[tuple[str, Any], ...] = ()
    fsdp: int | None = None
    products: str | None = None
    expert: int | None = None

    def name(self) -> str:
        """Of the file that caches it."""
        fields = dataclasses.astuple(self)
        text = "_".join(str(f) for f in fields if f not in (None, ()))
        return "".join(c if c.isalnum() or c in "-." else "_" for c in text)


def compile_row(
    row: Row, cache: Path | None = None, constants: Constants = STATED
) -> dict[str, Any]:
    """Of one device: bytes, by part and in all; seconds of a step, replayed.

    "exposed" are those in which nothing hides a collective, "wire" the bytes received,
    "network" those of them that come through the device's own network port.
    """
    speed = "" if constants == STATED else f"_{digest(constants)}"
    path = cache and cache / f"jax{jax.__version__}_{row.name()}{speed}.json"
    if path and path.exists():
        return json.loads(path.read_text())
    mesh = make_mesh(row)
    options, left_out = supported(row.options, mesh.devices.flat[0])
    offloads = "offload" in dict(row.policy)
    # Where arrays are in host memory the mesh is an abstract one (see compile_for).
    traced, state, parameters = trace(row, mesh.abstract_mesh if offloads else mesh)
    start = time.perf_counter()
    if offloads:
        compiled = compile_for(mesh, traced, options)
    else:
        compiled = traced.lower().compile(options)
    memory = compiled.memory_analysis()
    took = time.perf_counter() - start
    gpu, number = parse(row.topology)
    gpu = dataclasses.replace(gpu, constants=constants)
    module = hlo.parse(compiled.as_text())
    timeline = replay(module, gpu, number)
    moved = [e for e in timeline.events if e.stream == COLLECTIVES]
    result = {
        "elements": sum(x.size for x in jax.tree.leaves(parameters)),
        "parameters": local_bytes(parameters),
        "optimizer": local_bytes(state) - local_bytes(parameters),
        "temporary": memory.temp_size_in_bytes,
        "total": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "host": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        "left_out": left_out,
        "step": timeline.seconds,
        "exposed": timeline.exposed,
        "wire": sum(e.bytes for e in moved),
        "network": Traffic(count(module, number, gpu), {}).network_bytes,
        "synchronous": len(timeline.synchronous),
        "seconds": took,
        "row": dataclasses.asdict(row),
    }
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
    return result


def digest(constants: Constants) -> str:
    """For the name of a file."""
    return hashlib.sha256(repr(constants).encode()).hexdigest()[:8]


def make_mesh(row: Row) -> Mesh:
    """The mesh of a strategy; "hybrid" shards over ``row.fsdp`` of its devices."""
    there = devices(row.topology)
    if row.strategy == "hybrid":
        fsdp, expert = row.fsdp or 8, row.expert or 1
        replica = len(there) // (fsdp * expert)
        return jshard.make_mesh(
            fsdp=fsdp, replica=replica, expert=expert, devices=there
        )
    if row.strategy == "ddp":
        return jshard.make_mesh(fsdp=1, replica=len(there), devices=there)
    return jshard.make_mesh(devices=there)


def trace(row: Row, mesh: Any) -> tuple[jax.stages.Traced, Any, Any]:
    """The traced step, its abstract state, and the parameters of that."""
    name, _, argument = row.recipe.partition(":")
    recipe = importlib.import_module(f"jshard.recipes.{name}")
    config = recipe.get_config(argument) if argument else recipe.get_config()
    config.model.update({"attention": row.attention, **dict(row.model)})
    if row.layers:
        config.model.num_layers = row.layers
    optimizer = recipe.make_optimizer(config)
    sharding = NamedSharding(mesh, gspmd.batch_spec(mesh))
    shape = (mesh.size * row.batch, config.model.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    batch = {"inputs": tokens, "targets": tokens, "weights": weights}

    def make_model(rngs):
        model = recipe.make_model(config, rngs)
        if row.system == "gspmd" and row.products == "float8":
            use_float8(model.blocks)
        if row.system == "gspmd" and row.expert:
            use_dropping(model.blocks, mesh)
        return model

    with tracing_for(parse(row.topology)[0]):
        if row.system == "gspmd":
            if row.strategy not in ("zero3", "hybrid", "ddp"):
                raise jshard.UserError(f"gspmd has no {row.strategy}")
            config.model.dtype = "bfloat16"
            state, graphdef = gspmd.abstract_state(
                make_model, optimizer, mesh, row.rules or "maxtext"
            )
            form = gspmd.Form(row.remat, **dict(row.form))
            step = gspmd.train_step(graphdef, optimizer, mesh, form, state)
            return step.trace(state, batch), state, state[0]
        fsdp = jshard.FSDP(mesh, make_policy(row))
        state = fsdp.abstract_state(make_model, optimizer)
        step = fsdp.train_step(recipe.loss_fn, optimizer)
        return step.trace(state, batch), state, state.params


def make_policy(row: Row) -> jshard.Policy:
    """The policy of a strategy."""
    strategy = {
        "zero2": {"reshard_after_forward": False},
        "zero1": {"defer_scatter": True},
    }.get(row.strategy, {})
    settings: dict[str, Any] = {
        "remat": row.remat,
        "precision": jshard.Precision(compute="bfloat16", products=row.products),
        **strategy,
        **dict(row.policy),
    }
    return jshard.Policy(**settings)


@functools.cache
def supported(name: str, device: Any) -> tuple[dict[str, Any], list[str]]:
    """The options of one of ``gspmd.OPTIONS`` that this JAX knows; see ``known``."""
    return known(gspmd.OPTIONS[name], device)


def known(options: dict[str, Any], device: Any) -> tuple[dict[str, Any], list[str]]:
    """The options that this JAX knows, as it spells them; names of the others."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    one = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda x: x + 1).lower(one)
    found, left_out = {}, []
    for option, value in options.items():
        newer = option.replace("enable_pipelined", "pipeline")
        for spelled, given in (
            (option, value),
            (newer, "COLLECTIVE_PIPELINING_MODE_ON"),
        ):
            try:
                lowered.compile({spelled: given})
            except jax.errors.JaxRuntimeError as error:
                if "No such compile option" not in str(error):
                    raise
            else:
                found[spelled] = given
                break
        else:
            left_out.append(option)
    return found, left_out


def local_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )

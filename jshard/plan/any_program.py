"""Plans of programs that are not a recipe's: any function, and files of XLA's.

A function is compiled for the devices of its arguments' shardings, which need not be
there; a file holds a program that XLA has compiled anywhere.
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jshard.plan.cost.timeline import replay
from jshard.plan.cost.traffic import Traffic, count
from jshard.plan.fit.device_memory import compiled_bytes
from jshard.plan.fit.hardware import FITTED, Constants
from jshard.plan.hlo import Module, parse
from jshard.plan.hlo.program_file import (
    is_of_cpus,
    number_of_devices,
    parse_program,
    read_program,
    unknowns,
)
from jshard.plan.hlo.well_formed import MOST_RUNS, runs
from jshard.plan.memory.owners import memory_by_owner
from jshard.plan.planning import Plan
from jshard.plan.program import ATTACHED, find_gpu
from jshard.plan.topology import devices, tracing_for
from jshard.plan.topology import parse as parse_topology
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

_MOST_CONSTANTS = 2**31  # bytes that XLA's message of a program holds
_ESTIMATED = (
    "the memory is that of values alive at the same time in this schedule; gaps in "
    "XLA's heap come on top, 0 to 5 % of the total in the steps that were compared"
)


def plan(
    function: Callable[..., Any],
    *arguments: Any,
    topology: str = ATTACHED,
    constants: Constants = FITTED,
) -> Plan:
    """Compiles a function, and says what a call needs, sends and takes.

    Args:
      function: What ``jax.jit`` compiles, or what it returned; jit's options, such as
        donated arguments, are given there.
      *arguments: Arrays or ``jax.ShapeDtypeStruct`` in any trees. For absent GPUs
        their shardings are over meshes of ``jshard.plan.devices(topology)``; without
        any, the topology must be one GPU.
      topology: ``"h100:64"``, or ``"attached"`` for this machine's devices.
      constants: Of the cost model.

    Raises:
      UserError: The topology is unknown or is not that of the shardings, or the
        function holds too much data in itself.
    """
    absent = topology != ATTACHED
    if absent:
        arguments = _placed(arguments, topology)
    jitted: Any = function if hasattr(function, "trace") else jax.jit(function)
    start = time.perf_counter()
    gpu = find_gpu(topology)
    with tracing_for(gpu) if gpu and absent else nullcontext():
        traced = jitted.trace(*arguments)
        closed = getattr(traced, "jaxpr", None)  # nnx.jit hides it
        held = sum(getattr(x, "nbytes", 0) for x in (closed.consts if closed else ()))
        if held > _MOST_CONSTANTS:
            raise UserError(
                f"plan: the function holds {format_bytes(held)} of arrays, which would "
                "be constants of its program, and XLA takes 2 GiB: give them as "
                "arguments"
            )
        compiled = traced.lower().compile()
    text = compiled.as_text() or ""
    about = f"compiled in {time.perf_counter() - start:.1f} s"
    if absent:
        _check_number("the function's program", text, topology)
    made = _Program(getattr(function, "__name__", "function"), about, text, parse(text))
    return _plan(made, topology, constants, compiled_bytes(compiled))


def plan_file(
    path: Path, topology: str = ATTACHED, constants: Constants = FITTED
) -> Plan:
    """Plans a program that XLA compiled, from its text.

    Args:
      path: What ``compiled.as_text()`` returned, or a ``*_after_optimizations.txt``.
      topology: The devices it was compiled for, ``"h100:64"``.
      constants: Of the cost model.

    Raises:
      UserError: The file cannot be read, is not that of an optimized program, or is one
        for other devices.
    """
    text = read_program(path)
    module = parse_program(path, text)
    if topology != ATTACHED:
        if is_of_cpus(module, text):
            raise UserError(
                f"--from-hlo={path}: XLA compiled this for CPUs, so it does not show "
                f"what {topology} would run: compile it for them (docs/plan.md)"
            )
        _check_number(str(path), text, topology)
    about = f"{len(module.instructions):,} instructions"
    return _plan(_Program(path.name, about, text, module), topology, constants, None)


class _Program(NamedTuple):
    name: str
    about: str
    text: str
    module: Module


def _plan(
    program: _Program, topology: str, constants: Constants, total: int | None
) -> Plan:
    module = program.module
    number, gpu = number_of_devices(program.text), find_gpu(topology)
    if gpu is not None:
        gpu = dataclasses.replace(gpu, constants=constants)
    kind = gpu.name if gpu else jax.devices()[0].device_kind
    notes = [] if total is not None else [_ESTIMATED]
    long = (ran := runs(module, module.entry)) > MOST_RUNS
    if long:
        notes.append(
            f"a call runs {ran:,} instructions, and a timeline has at most "
            f"{MOST_RUNS:,}: plan fewer trips of the loops"
        )
    return Plan(
        name=program.name,
        about=program.about,
        topology=topology,
        gpu=gpu,
        devices=number,
        device_kind=kind,
        text=program.text,
        module=module,
        memory=memory_by_owner(module, program.text, number, gpu, total),
        traffic=Traffic(count(module, number, gpu), {}),
        timeline=None if gpu is None or long else replay(module, gpu, number),
        notes=(*notes, *unknowns(module)),
    )


def _check_number(what: str, text: str, topology: str) -> None:
    number = number_of_devices(text)
    if number != parse_topology(topology)[1]:
        raise UserError(
            f"--topology={topology}: {what} is for {number} device{'s' * (number > 1)}"
        )


def _placed(arguments: Any, topology: str) -> Any:
    """Returns abstract arguments for absent devices.

    Raises:
      UserError: Their shardings are over other devices, or there are none for several.
    """
    there, leaves = devices(topology), jax.tree.leaves(arguments)
    shardings = [sharding for x in leaves if (sharding := _sharding(x)) is not None]
    placed = {d for sharding in shardings for d in sharding.device_set}
    # Each call of `devices` makes new ones, and JAX's own call does.
    others = [d for d in placed if d.device_kind != there[0].device_kind]
    if others:
        kind = min(device.device_kind for device in others)
        raise UserError(
            f"plan: an argument is on {len(others)} x {kind}, and the topology is "
            f"{topology}: give shardings over a mesh of "
            f"jshard.plan.devices({topology!r})"
        )
    if not shardings and len(there) > 1:
        raise UserError(
            f"plan: no argument has a sharding, so the function runs on one device and "
            f"not on {topology}: give shardings over a mesh of "
            f"jshard.plan.devices({topology!r})"
        )
    one = None if shardings else SingleDeviceSharding(there[0])

    def abstract(x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x) or one)

    return jax.tree.map(abstract, arguments)


def _sharding(x: Any) -> Any:
    """Returns where an argument has to be; None if anywhere will do."""
    if isinstance(x, jax.Array) and not x.committed:
        return None
    return getattr(x, "sharding", None)

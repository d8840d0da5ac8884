"""Plans of programs that are not a recipe's: any function, and files of XLA's.

A function is compiled for the devices of its arguments' shardings, which need not be
there; a file holds a program that XLA has compiled anywhere.
"""

import dataclasses
import functools
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

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
from jshard.plan.topology import compile_for, devices, tracing_for
from jshard.plan.topology import parse as parse_topology
from jshard.system.compat import absent_gpus
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

_MOST_CONSTANTS = 2**31  # bytes that XLA's message of a program holds
_OTHERS = re.compile("incompatible devices|Memory kinds passed to jax.jit")
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
      function: What ``jax.jit``, ``nnx.jit`` or ``eqx.filter_jit`` takes or returned;
        jit's options, such as donated arguments, are given there. A
        ``functools.partial`` of such a step brings arguments of its own.
      *arguments: Arrays or ``jax.ShapeDtypeStruct`` in any trees. For absent GPUs
        their shardings are over meshes of ``jshard.plan.devices(topology)``, or of
        their ``abstract_mesh``, which alone has host memory; without any, the topology
        must be one GPU.
      topology: ``"h100:64"``, or ``"attached"`` for this machine's devices.
      constants: Of the cost model.

    Raises:
      UserError: The topology is unknown or is not that of the shardings, or the
        function holds too much data in itself.
    """
    absent = topology != ATTACHED
    function, arguments, named = _called(function, arguments)
    over = None
    if absent:
        (arguments, named), over = _placed((arguments, named), topology)
    jitted: Any = function
    if not hasattr(function, "trace"):
        jitted, arguments = _filtered(function, arguments)
    start = time.perf_counter()
    try:
        with _as_if_on(topology):
            compiled = _compile(jitted, arguments, named, over)
    except ValueError as error:  # JAX's own line names the argument
        if not absent or not _OTHERS.search(str(error)):
            raise
        raise UserError(
            "plan: the function has shardings over other devices in itself or in "
            f"jax.jit than its arguments over {topology}: make it with a mesh of "
            f"jshard.plan.devices({topology!r})"
        ) from error
    text = _with_names(compiled.as_text() or "", jitted, arguments, named)
    about = f"compiled in {time.perf_counter() - start:.1f} s"
    module = parse(text)
    if absent:
        alone = number_of_devices(text) == 1 < parse_topology(topology)[1]
        if alone or is_of_cpus(module, text):
            raise UserError(
                f"plan: the function runs on {'one device' if alone else 'CPUs'} and "
                f"not on {topology}: give its arguments, or jax.jit, shardings over a "
                f"mesh of jshard.plan.devices({topology!r})"
            )
        _check_number("the function's program", text, topology)
    made = _Program(getattr(function, "__name__", "function"), about, text, module)
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


def _called(function: Any, arguments: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the step of a partial or a method of one, and all of its arguments."""
    named: dict[str, Any] = {}
    while True:
        if isinstance(function, functools.partial) and hasattr(function.func, "trace"):
            arguments = (*function.args, *arguments)
            named = function.keywords | named
            function = function.func
        elif inspect.ismethod(function) and hasattr(function, "trace"):
            arguments = (function.__self__, *arguments)
            function = function.__func__
        else:
            return function, arguments, named


def _compile(step: Any, arguments: Any, named: Any, over: Mesh | None) -> Any:
    traced = step.trace(*arguments, **named)
    closed = getattr(traced, "jaxpr", None)  # nnx.jit hides it
    held = sum(getattr(x, "nbytes", 0) for x in (closed.consts if closed else ()))
    if held > _MOST_CONSTANTS:
        raise UserError(
            f"plan: the function holds {format_bytes(held)} of arrays, which would "
            "be constants of its program, and XLA takes 2 GiB: give them as "
            "arguments"
        )
    return compile_for(over, traced) if over else traced.lower().compile()


def _filtered(function: Any, arguments: Any) -> tuple[Any, Any]:
    """Returns a step to trace, and its arguments, of which all leaves are arrays.

    Others, such as an activation function of a model, are constants of the step, as
    Equinox's ``filter_jit`` has them; it says itself what it donates.
    """
    first, rest = (
        getattr(function, name, False) for name in ("donate_first", "donate_rest")
    )
    donated = [i for i in range(len(arguments)) if (rest if i else first)]
    if not donated and all(map(_is_array, jax.tree.leaves(arguments))):
        return jax.jit(function), arguments
    given = jax.tree.map(lambda x: x if _is_array(x) else None, arguments)

    @functools.wraps(function)
    def step(*arrays: Any) -> Any:
        whole = jax.tree.map(
            lambda x, given: given if x is None else x,
            arrays,
            arguments,
            is_leaf=lambda x: x is None,
        )
        return [x for x in jax.tree.leaves(function(*whole)) if _is_array(x)]

    return jax.jit(step, donate_argnums=donated), given


def _with_names(text: str, step: Any, arguments: Any, named: Any) -> str:
    """Returns a program's text with the names of variables that nnx.jit numbers."""
    if ".states[0][" not in text:
        return text
    given = inspect.signature(step).bind(*arguments, **named).arguments
    for name, x in given.items():
        if not nnx.graph.is_node(x) or isinstance(x, dict | list | tuple):
            continue
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(x))]

        def path_of(match: re.Match[str], paths: Any = paths) -> str:
            path = paths[int(match[2])]
            return match[1] + "".join(
                f"[{key}]" if isinstance(key, int) else f".{key}" for key in path
            )

        text = re.sub(rf"\b({re.escape(name)})\.states\[0\]\[(\d+)\]", path_of, text)
    return text


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


@contextmanager
def _as_if_on(topology: str) -> Iterator[None]:
    """Traces as on a machine with these devices."""
    gpu = find_gpu(topology)
    if topology == ATTACHED or gpu is None:
        yield
    else:
        with tracing_for(gpu), absent_gpus.asked_for(devices(topology)):
            yield


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


def _placed(arguments: Any, topology: str) -> tuple[Any, Mesh | None]:
    """Returns abstract arguments for absent devices, and the mesh of an abstract one.

    Raises:
      UserError: Their shardings are over other devices.
    """
    there, leaves = devices(topology), jax.tree.leaves(arguments)
    shardings = [sharding for x in leaves if (sharding := _sharding(x)) is not None]
    meshes = {getattr(sharding, "mesh", None) for sharding in shardings}
    abstract_meshes = [mesh for mesh in meshes if isinstance(mesh, AbstractMesh)]
    if abstract_meshes:
        return arguments, _mesh_like(abstract_meshes[0], there, topology)
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
    # Of several devices, jit's shardings or those within the function may be.
    alone = not shardings and len(there) == 1
    one = SingleDeviceSharding(there[0]) if alone else None

    def abstract(x: Any) -> Any:
        if not _is_array(x):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x) or one)

    return jax.tree.map(abstract, arguments), None


def _mesh_like(mesh: AbstractMesh, there: list[Any], topology: str) -> Mesh:
    if mesh.size != len(there):
        raise UserError(
            f"plan: an argument is over a mesh of {mesh.size} devices, and the "
            f"topology is {topology}"
        )
    grid = np.array(there).reshape(mesh.axis_sizes)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _sharding(x: Any) -> Any:
    """Returns where an argument has to be; None if anywhere will do."""
    if isinstance(x, jax.Array) and not x.committed:
        return None
    return getattr(x, "sharding", None)

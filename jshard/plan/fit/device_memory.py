"""The memory of a device, what a step needs of it, and an estimate before compiling.

The estimate follows a jaxpr in its order and adds up the arrays that are alive at the
same time. It assumes what XLA does on the whole: elementwise operations are fused into
what reads them, so that only products, collectives, attention and reductions write
arrays, and read arrays that are in memory.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from jshard.sharding.layout.capacity import device_limit, host_bytes
from jshard.system.compat.jaxprs import CALLS, open_inner, scan_body, scan_sizes
from jshard.system.errors import UserError

# Of what an allocator may hand out; the rest is for batches that wait, for metrics, and
# for gaps between arrays.
_USABLE = 0.97
_OF_RAM = 0.75  # that a training run on CPU devices may take

# Primitives, by the beginning of their names, that read and write arrays in memory.
_WRITING = (
    "dot_general", "conv_general", "dot_product_attention", "pallas_call", "all_gather",
    "all_to_all", "reduce_scatter", "psum", "pmax", "ppermute", "gather", "scatter",
    "sort", "cum", "reduce", "arg", "random", "threefry", "custom_call", "ffi_call",
    "block_scaled_dot",
)  # fmt: skip
# Those whose result is an input in other words.
_SAME = (
    "reshape", "squeeze", "expand_dims", "name", "copy", "pcast", "pvary", "transpose",
    "optimization_barrier", "reduce_precision", "sharding_constraint",
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class _Array:
    """An array in memory."""

    bytes: int


@dataclasses.dataclass
class _Value:
    """A variable: an array in memory, or what is computed from one when it is read."""

    array: _Array | None  # None for what constants alone determine
    written: bool


@dataclasses.dataclass
class _Operation:
    """What reads and writes arrays; ``inside`` are bytes that it needs meanwhile."""

    reads: list[_Array]
    writes: list[_Array]
    inside: int = 0


def usable_bytes(devices: Sequence[Any]) -> int:
    """Returns the bytes that a step may use on each of this process's devices.

    Raises:
      UserError: The devices do not say how much memory they have.
    """
    if devices[0].platform == "cpu":  # they share the machine's memory
        return int(_OF_RAM * host_bytes()) // len(devices)
    if not (limit := device_limit(devices)):
        raise UserError(
            f"--config.policy.remat, --config.policy.accumulate: {devices[0]} does not "
            "say how much memory it has; give values in place of fit"
        )
    return int(_USABLE * limit)


def compiled_bytes(compiled: jax.stages.Compiled, space: str = "") -> int:
    """Returns the bytes that a program needs on a device, its arguments included.

    `space` is "" for the device's memory, and "host_" for pinned host memory.
    """
    found = compiled.memory_analysis()
    arguments, outputs, aliases, temporary = (
        getattr(found, f"{space}{kind}_size_in_bytes")
        for kind in ("argument", "output", "alias", "temp")
    )
    return arguments + outputs - aliases + temporary


def step_bytes(jaxpr: core.Jaxpr) -> int:
    """Estimates the bytes that a step needs on a device, beside its inputs."""
    return max((_peak(inner) for inner in _of_one_device(jaxpr)), default=0)


def _of_one_device(jaxpr: core.Jaxpr) -> Iterator[core.Jaxpr]:
    for eqn in jaxpr.eqns:
        for inner in core.jaxprs_in_params(eqn.params):
            if eqn.primitive.name == "shard_map":
                yield inner
            else:
                yield from _of_one_device(inner)


def _peak(jaxpr: core.Jaxpr) -> int:
    """Returns the most bytes that are alive at a time, not counting the inputs."""
    operations: list[_Operation] = []
    inputs = [_Value(_Array(0), True) for _ in (*jaxpr.constvars, *jaxpr.invars)]
    outputs = _follow(jaxpr, inputs, operations)
    last: dict[_Array, int] = {}
    for i, operation in enumerate(operations):
        last |= dict.fromkeys((*operation.reads, *operation.writes), i)
    last |= dict.fromkeys((x.array for x in outputs if x.array), len(operations))
    alive = most = 0
    for i, operation in enumerate(operations):
        alive += sum(array.bytes for array in operation.writes)
        most = max(most, alive + operation.inside)
        ended = {x for x in (*operation.reads, *operation.writes) if last[x] == i}
        alive -= sum(array.bytes for array in ended)
    return most


def _follow(
    jaxpr: core.Jaxpr, inputs: Sequence[_Value], operations: list[_Operation]
) -> list[_Value]:
    """Appends a jaxpr's operations, those of calls included; returns its outputs."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def value(atom: Any) -> _Value:
        return _Value(None, False) if isinstance(atom, core.Literal) else env[atom]

    def in_memory(atom: Any) -> _Array | None:
        """Returns an array that is read as such, and so has been written."""
        found = value(atom)
        if found.array is None or found.written:
            return found.array
        made = _Array(_nbytes(atom.aval))
        operations.append(_Operation([found.array], [made]))
        env[atom] = _Value(made, True)
        return made

    for eqn in jaxpr.eqns:
        name, values = eqn.primitive.name, [value(x) for x in eqn.invars]
        inner = open_inner(eqn) if name in CALLS or "remat" in name else None
        if inner is not None:
            consts = [_Value(_Array(0), True) for _ in inner.constvars]
            outputs = _follow(inner, [*consts, *values], operations)
        elif name.startswith(_WRITING) or list(core.jaxprs_in_params(eqn.params)):
            length = eqn.params.get("length")
            # Then the compiled program has no loop.
            unrolled = name == "scan" and eqn.params["unroll"] >= length
            reads = (
                [x.array for x in values] if unrolled else map(in_memory, eqn.invars)
            )
            reads = [x for x in reads if x]
            inside = max(map(_peak, core.jaxprs_in_params(eqn.params)), default=0)
            outputs = _kept_by_layers(eqn) if unrolled else _written(eqn)
            outputs = _in_place(eqn, values, outputs)
            made = list({x.array for x in outputs if x.array} - {*reads})
            operations.append(_Operation(reads, made, inside))
        else:
            outputs = [_fused(eqn, x, values) for x in eqn.outvars]
            if name.startswith(_SAME) and len(values) == len(outputs):
                outputs = values
            elif len({x.array for x in values if x.array}) > 1:
                for output in outputs:
                    if output.written and output.array:
                        reads = [x.array for x in values if x.array]
                        operations.append(_Operation(reads, [output.array]))
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _written(eqn: Any) -> list[_Value]:
    return [_Value(_Array(_nbytes(x.aval)), True) for x in eqn.outvars]


def _kept_by_layers(scan: Any) -> list[_Value]:
    """Returns the results of layers without a loop, of which each keeps its own.

    A loop writes all that it hands out. Without one, results of the same array are one.
    """
    body = scan_body(scan)
    variables = (*body.constvars, *body.invars)
    inputs = [_Value(_Array(_nbytes(x.aval)), True) for x in variables]
    results, length = _follow(body, inputs, []), scan.params["length"]
    arrays = {x.array for x in results if x.array}
    stacked = {array: _Array(array.bytes * length) for array in arrays}
    outputs = [_Value(x.array and stacked[x.array], x.written) for x in results]
    _, carry = scan_sizes(scan)
    return _written(scan)[:carry] + outputs[carry:]


def _in_place(
    eqn: Any, values: Sequence[_Value], outputs: list[_Value]
) -> list[_Value]:
    """Returns the results, of which those that a loop carries are in place."""
    if eqn.primitive.name == "scan":
        consts, carry = scan_sizes(eqn)
        for i, before in enumerate(values[consts : consts + carry]):
            if before.array and before.written and before.array.bytes:
                outputs[i] = before
    return outputs


def _fused(eqn: Any, output: Any, values: Sequence[_Value]) -> _Value:
    """Returns the result of an elementwise operation: of one array, or a new one."""
    large = {
        x.array
        for x, atom in zip(values, eqn.invars, strict=True)
        if x.array is not None and 2 * atom.aval.size >= output.aval.size
    }
    if len(large) == 1:
        return _Value(large.pop(), False)
    if not large:
        return _Value(None, False)
    return _Value(_Array(_nbytes(output.aval)), True)


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "dtype") else 0

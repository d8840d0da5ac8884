"""Which values of a jaxpr are in memory, and until when.

XLA fuses what works element by element into what reads it, so that only some values
are ever in memory: results of products, collectives, loops and reductions, and what
those (but for reductions) read. A value that is not is computed again from what it
comes from, which must live as long.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jshard.compat.jaxprs import scan_sizes

PARAMETERS, REST = 1, 2  # what a value depends on, as bits

# Nothing moves: the result is the operand.
_VIEWS = {"reshape", "squeeze", "expand_dims", "pvary", "copy", "name", "transpose"}
_VIEWS |= {"optimization_barrier", "sharding_constraint", "copy_p", "bitcast"}
_VIEWS |= {"host_array_as_device_array", "stop_gradient", "pcast", "reduce_precision"}
_REDUCTIONS = ("reduce_", "argm", "cum")
# Kernels of their own, whose operands and results are in memory.
_KERNELS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
_KERNELS |= {"scan", "while", "cond", "sort", "top_k", "custom_call", "ffi_call"}
_KERNELS |= {"scatter", "scatter-add", "scatter_add", "device_put", "pallas_call"}
_COLLECTIVES = {"all_gather", "reduce_scatter", "all_to_all", "ppermute"}
_COLLECTIVES |= {"psum", "psum_invariant", "pmax", "pmin", "psum2"}
# Gradients pass these on their way from a layer's products to the parameter's shard.
_SUMMED = {"reduce_scatter", "psum", "psum_invariant", "all_to_all", "add", "add_any"}
_SUMMED |= {"mul", "div", "convert_element_type", "dynamic_update_slice", "concatenate"}
_SUMMED |= {"select_n", "slice"} | _VIEWS


@dataclasses.dataclass(eq=False)
class Value:
    """A value: its bytes on one device, and where they are.

    Attributes:
      nbytes: if it were in memory.
      bits: what it depends on.
      hosted: whether it is in host memory.
      start: the step that makes it; -1 is before the first.
      end: the last step that reads it, or what is computed again from it.
      phase: "jvp" or "transpose" of the step that makes it.
      last_phase: of the last step that reads it.
      stored: whether it is in memory.
      alias: the value whose memory it has.
      sources: what it is computed again from.
      readers: how many steps read it.
      last: the last of them.
      gradient: whether it is on its way to be a parameter's gradient.
      counted: whether it counts here (not what the caller counts).
    """

    nbytes: int
    bits: int = 0
    hosted: bool = False
    start: int = -1
    end: int = -1
    phase: str = ""
    last_phase: str = ""
    stored: bool = False
    alias: "Value | None" = None
    sources: "tuple[Value, ...]" = ()
    readers: int = 0
    last: int = -1
    gradient: bool = False
    counted: bool = True


@dataclasses.dataclass(eq=False)
class Step:
    """An equation with its calls inlined, on values."""

    eqn: Any
    inputs: list[Value]
    outputs: list[Value]
    phase: str
    local: bool  # inside shard_map


def mark_gradients(steps: list[Step], marked: list[Value]) -> dict[int, list[bool]]:
    """Marks what becomes gradients; returns, of loops, which results do."""
    for value in marked:
        value.gradient = True
    inner: dict[int, list[bool]] = {}
    maker = {id(v): step for step in steps for v in step.outputs}
    for i in reversed(range(len(steps))):
        step = steps[i]
        name = step.eqn.primitive.name
        if not any(v.gradient for v in step.outputs):
            continue
        if name == "scan":
            consts, carry = scan_sizes(step.eqn)
            inner[i] = [v.gradient for v in step.outputs]
            for value, is_gradient in zip(
                step.inputs[consts : consts + carry], inner[i][:carry], strict=True
            ):
                value.gradient |= is_gradient
        elif name == "optimization_barrier":
            for value, out in zip(step.inputs, step.outputs, strict=True):
                value.gradient |= out.gradient
        elif name in _SUMMED:
            size = max(v.nbytes for v in step.outputs)
            for value in step.inputs:
                # (A shard, the whole, or a cast of it; no scale or index.)
                value.gradient |= value.nbytes * 4 >= size and value.bits != PARAMETERS
        elif name == "reduce_sum" and (made := maker.get(id(step.inputs[0]))):
            step.inputs[0].gradient |= made.eqn.primitive.name == "all_to_all"
    return inner


def place(steps: list[Step], outputs: list[Value], *, top: bool) -> None:
    """Decides what is in memory, and until when."""
    makers = {id(v): step.eqn.primitive.name for step in steps for v in step.outputs}
    for i, step in enumerate(steps):
        view = step.eqn.primitive.name in _VIEWS
        for value, out in zip(step.inputs, step.outputs, strict=False):
            out.alias = value if view else None
        for value in step.inputs if not view else ():
            _root(value).readers += 1
            _root(value).last = i
    for value in outputs if not top else ():
        _root(value).readers += 1
        _root(value).last = len(steps)
    for i, step in enumerate(steps):
        name = step.eqn.primitive.name
        if name in _VIEWS:
            continue
        if name == "dynamic_update_slice":
            _overwrite(step.inputs[0], step.outputs[0], i)
        elif name in ("add", "add_any") and (added := _product(step, makers)):
            # Products are added to what is there, in place.
            product, other = added
            if any(_memory(other)):
                product.stored = False
                _overwrite(other, step.outputs[0], i)
            else:  # zeros
                step.outputs[0].alias = product
                product.last = step.outputs[0].last
        elif name == "scan":
            consts, carry = scan_sizes(step.eqn)
            for value in step.inputs[: consts + carry]:
                _store(value)
            for value in step.outputs:
                value.stored = True
            entering = step.inputs[consts : consts + carry]
            for value, out in zip(entering, step.outputs, strict=False):
                _overwrite(value, out, i)
        elif _is_kernel(step.eqn):
            for value in step.inputs:
                _store(value)
            for value in step.outputs:
                # (To the host a loop's values go at once to where all layers' are.)
                value.stored = not (name == "device_put" and value.hosted)
        elif name.startswith(_REDUCTIONS):
            for value in step.outputs:
                value.stored = True
                value.sources = ()
        else:
            big = [_root(v) for v in step.inputs if v.nbytes]
            for value in step.outputs:
                value.sources = tuple(dict.fromkeys(big))
                apart = {
                    id(s)
                    for v in big
                    for s in _memory(v)
                    if 2 * s.nbytes > value.nbytes
                }
                # A sum that is read twice is stored, what is computed from one is not.
                value.stored = step.local and value.readers > 1 and len(apart) > 1
    for i, step in enumerate(steps):
        for value in step.inputs:
            _read(value, i, step.phase)
    last = len(steps)
    for value in outputs:
        root = _root(value)
        if top:  # in place of the arguments
            root.counted = root.start == -1
        else:
            _read(root, last, root.last_phase)


def _overwrite(value: Value, out: Value, step: int) -> None:
    """``out`` takes the memory of ``value``, where that is not read after ``step``."""
    _store(value)
    out.stored = True
    root = _root(value)
    if root.last <= step:
        out.alias, root.last = value, out.last


def _product(step: Step, makers: dict[int, str]) -> tuple[Value, Value] | None:
    """A product that only this sum reads, and what it is added to."""
    for product, other in (step.inputs, step.inputs[::-1]):
        same = product.nbytes == other.nbytes == step.outputs[0].nbytes
        if (
            makers.get(id(product)) == "dot_general"
            and _root(product).readers == 1
            and same
        ):
            return product, other
    return None


def _is_kernel(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return any(var.aval.size > 1 for var in eqn.outvars)
    return name in _KERNELS or "attention" in name or "custom" in name


def _root(value: Value) -> Value:
    while value.alias is not None:
        value = value.alias
    return value


def _store(value: Value) -> None:
    _root(value).stored = True


def _memory(value: Value) -> Iterable[Value]:
    """The values in memory that a value is, or is computed from."""
    todo, seen = [_root(value)], set()
    while todo:
        here = todo.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        if here.stored:
            yield here
        else:
            todo += [_root(source) for source in here.sources]


def _read(value: Value, step: int, phase: str) -> None:
    for source in _memory(value):
        if step >= source.end:
            source.end, source.last_phase = step, phase

"""What a device holds at the fullest moment of a step, from its jaxpr alone.

Nothing is compiled: the step's equations are walked in the order they are traced, which
is the order of layers that XLA keeps to. XLA fuses what works element by element into
what reads it, so that only some values are ever in memory: results of products,
collectives, loops and reductions, and what those (but for reductions) read. A value
that is not in memory is computed again from what it comes from, which must live as long.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend import core

from jshard.jaxprs import scan_body, scan_sizes
from jshard.remat import equation_dependencies
from jshard.state import TrainState

GRADIENTS, GATHERED = "gradients", "gathered weights"
SAVED, WORKSPACE, HOST = "saved activations", "workspace", "host"
# Bytes by kind; those in host memory come besides.
Held = collections.Counter[str]

_PARAMETERS, _REST = 1, 2  # what a value depends on, as bits
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_CALLS += ("checkpoint", "remat2", "shard_map", "core_call")
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
class _Value:
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
    alias: "_Value | None" = None
    sources: "tuple[_Value, ...]" = ()
    readers: int = 0
    last: int = -1
    gradient: bool = False
    counted: bool = True


@dataclasses.dataclass(eq=False)
class _Step:
    """An equation with its calls inlined, on values."""

    eqn: Any
    inputs: list[_Value]
    outputs: list[_Value]
    phase: str
    local: bool  # inside shard_map


@dataclasses.dataclass(frozen=True)
class Peak:
    """The fullest moment of the device.

    Attributes:
      held: bytes by kind, besides the arguments.
      where: the phase that it is in.
      host: bytes in host memory besides the arguments, when there are the most.
    """

    held: Held
    where: str
    host: int = 0


def peak(jaxpr: core.Jaxpr, state: TrainState, *, ahead: bool) -> Peak:
    """The fullest moment of a train step, the state and the batch not counted.

    Args:
      jaxpr: of ``train_step.trace(state, batch)``.
      state: abstract, with shardings.
      ahead: whether gathers are issued a layer ahead (pipelined or unrolled loops): two
        layers then are whole at a time.
    """
    leaves = jax.tree.leaves(state)
    params = {id(x) for x in jax.tree.leaves((state.params, state.frozen))}
    local = {}
    for x in leaves:  # and one layer of it
        for shape in (x.shape[1:], (1, *x.shape[1:]), x.shape):
            local[shape] = min(_local(x), local.get(shape, 1))
    walk = _Walk(ahead, local)
    inputs = [
        _Value(
            0,
            bits=_PARAMETERS if i < len(leaves) and id(leaves[i]) in params else _REST,
            counted=False,
            stored=True,
        )
        for i in range(len(jaxpr.invars))
    ]
    num_gradients = len(jax.tree.leaves(state.params))
    return walk.level(jaxpr, inputs, num_gradients, top=True)


def _local(x: Any) -> float:
    """A device's part of an array, as a fraction."""
    return math.prod(x.sharding.shard_shape(x.shape)) / max(x.size, 1)


def nbytes(aval: Any) -> int:
    """Bytes of an array, abstract or not; random keys are of 16."""
    itemsize = getattr(aval.dtype, "itemsize", 16)
    return math.prod(aval.shape) * itemsize


class _Walk:
    def __init__(self, ahead: bool, local: dict[tuple[int, ...], float]):
        self.ahead, self.local = ahead, local

    def level(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[_Value],
        gradients: int | Sequence[bool],
        *,
        top: bool = False,
        local: bool = False,
        within: str = "",
    ) -> Peak:
        """The fullest moment of a jaxpr whose inputs its caller counts.

        Args:
          jaxpr: the step, or what a loop does each time.
          inputs: its inputs.
          gradients: which outputs are gradients; of a step, how many of its
            ``shard_map``'s.
          top: whether it is the whole step.
          within: the phase of the loop it is in.
        """
        steps: list[_Step] = []
        outputs = self._flatten(jaxpr, inputs, steps, phase=within, local=local)
        if isinstance(gradients, int):
            marked = list(self._shard_map_outputs[:gradients])
        else:
            marked = [v for v, g in zip(outputs, gradients, strict=True) if g]
        inner_marks = _mark_gradients(steps, marked)
        _place(steps, outputs, top=top)
        return self._fullest(steps, inner_marks, top=top, within=within)

    def _flatten(
        self,
        jaxpr: core.Jaxpr,
        inputs: Sequence[_Value],
        steps: list[_Step],
        *,
        phase: str,
        local: bool,
    ) -> list[_Value]:
        env: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {var: _Value(nbytes(var.aval)) for var in jaxpr.constvars}

        def read(atom: Any) -> _Value:
            return _Value(0) if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            entering = list(map(read, eqn.invars))
            here = phase or _phase(eqn)
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner = getattr(inner, "jaxpr", inner)
            once = eqn.primitive.name == "scan" and eqn.params["length"] == 1
            if isinstance(inner, core.Jaxpr) and (
                once or eqn.primitive.name in _CALLS
            ):
                manual = eqn.primitive.name == "shard_map"
                results = self._flatten(
                    inner, entering, steps, phase=here, local=local or manual
                )
                if manual:
                    self._shard_map_outputs = results
            else:
                bits = equation_dependencies(eqn, [v.bits for v in entering])
                results = [
                    self._value(var.aval, bit, here, len(steps), local)
                    for var, bit in zip(eqn.outvars, bits, strict=True)
                ]
                steps.append(_Step(eqn, entering, results, here, local))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _value(
        self, aval: Any, bits: int, phase: str, start: int, local: bool
    ) -> _Value:
        size = nbytes(aval)
        if not local:
            size = int(size * self.local.get(aval.shape, 1))
        hosted = getattr(aval, "memory_space", None) == jax.memory.Space.Host
        return _Value(size, bits, hosted, start, start, phase)

    def _fullest(
        self, steps: list[_Step], marks: dict[int, Any], *, top: bool, within: str
    ) -> Peak:
        starts, ends = collections.defaultdict(list), collections.defaultdict(list)
        for step in steps:
            for value in step.outputs:
                if value.stored and value.alias is None and value.counted:
                    starts[value.start].append(value)
                    ends[value.end].append(value)
        early = self._early(steps) if self.ahead else {}
        held: Held = collections.Counter()
        best, host = Peak(collections.Counter(), ""), 0
        for i, step in enumerate(steps):
            for value in starts[i]:
                held[_kind(value, step, within)] += value.nbytes
            inside = self._inside(step, marks.get(i), within)
            now = held + inside.held
            now[GATHERED] += early.get(i, 0)
            host = max(host, held[HOST] + inside.host)
            if _total(now) > _total(best.held):
                best = Peak(now, inside.where or step.phase or "update" * top)
            for value in ends[i]:
                made_by = steps[value.start]
                held[_kind(value, made_by, within)] -= value.nbytes
        best.held.pop(HOST, None)
        return dataclasses.replace(best, host=host)

    def _inside(self, step: _Step, marks: Any, within: str) -> Peak:
        if step.eqn.primitive.name != "scan":
            return Peak(collections.Counter(), "")
        body, (consts, carry) = scan_body(step.eqn), scan_sizes(step.eqn)
        bits = [v.bits for v in step.inputs]
        out = equation_dependencies(step.eqn, bits)
        inputs = []
        for i, var in enumerate(body.invars):
            sliced = i >= consts + carry
            bit = bits[i] | (out[i - consts] if consts <= i < consts + carry else 0)
            inputs.append(
                _Value(nbytes(var.aval), bit, stored=not sliced, counted=False)
            )
        where = step.phase or within
        found = self.level(
            body,
            inputs,
            marks or [False] * len(out),
            local=step.local,
            within=where,
        )
        extra = self._issued_ahead(body) if self.ahead else 0
        held = found.held + collections.Counter({GATHERED: extra})
        return Peak(held, f"{where} loop", found.host)

    def _early(self, steps: list[_Step]) -> dict[int, int]:
        """Bytes of a loop's first gathers, at the steps after the loop before it."""
        loops = [
            (i, self._issued_ahead(scan_body(step.eqn)))
            for i, step in enumerate(steps)
            if step.eqn.primitive.name == "scan"
        ]
        loops = [(i, size) for i, size in loops if size]
        return {
            i: size
            for (before, _), (loop, size) in itertools.pairwise(loops)
            for i in range(before + 1, loop)
        }

    def _issued_ahead(self, body: core.Jaxpr) -> int:
        """Bytes that a layer's gathers make."""
        return sum(
            nbytes(var.aval)
            for eqn in body.eqns
            if eqn.primitive.name == "all_gather"
            for var in eqn.outvars
        )


def _phase(eqn: Any) -> str:
    stack = str(eqn.source_info.name_stack)
    for phase in ("transpose", "jvp"):
        if stack.startswith(phase):
            return phase
    return ""


def _total(held: Held) -> int:
    return sum(size for kind, size in held.items() if kind != HOST)


def _kind(value: _Value, made_by: _Step, within: str) -> str:
    if value.hosted:
        return HOST
    if value.gradient:
        return GRADIENTS
    if value.bits == _PARAMETERS and made_by.local:
        return GATHERED
    saved = value.phase == "jvp" and value.last_phase == "transpose"
    return SAVED if saved and not within else WORKSPACE


def _mark_gradients(steps: list[_Step], marked: list[_Value]) -> dict[int, list[bool]]:
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
                value.gradient |= value.nbytes * 4 >= size and value.bits != _PARAMETERS
        elif name == "reduce_sum" and (made := maker.get(id(step.inputs[0]))):
            step.inputs[0].gradient |= made.eqn.primitive.name == "all_to_all"
    return inner


def _place(steps: list[_Step], outputs: list[_Value], *, top: bool) -> None:
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
            for value in step.inputs[:consts + carry]:
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
                apart = {id(s) for v in big for s in _memory(v) if 2 * s.nbytes > value.nbytes}
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


def _overwrite(value: _Value, out: _Value, step: int) -> None:
    """``out`` takes the memory of ``value``, where that is not read after ``step``."""
    _store(value)
    out.stored = True
    root = _root(value)
    if root.last <= step:
        out.alias, root.last = value, out.last


def _product(
    step: _Step, makers: dict[int, str]
) -> tuple[_Value, _Value] | None:
    """A product that only this sum reads, and what it is added to."""
    for product, other in (step.inputs, step.inputs[::-1]):
        same = product.nbytes == other.nbytes == step.outputs[0].nbytes
        if makers.get(id(product)) == "dot_general" and _root(product).readers == 1 and same:
            return product, other
    return None


def _is_kernel(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES:
        return any(var.aval.size > 1 for var in eqn.outvars)
    return name in _KERNELS or "attention" in name or "custom" in name


def _root(value: _Value) -> _Value:
    while value.alias is not None:
        value = value.alias
    return value


def _store(value: _Value) -> None:
    _root(value).stored = True


def _memory(value: _Value) -> Iterable[_Value]:
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


def _read(value: _Value, step: int, phase: str) -> None:
    for source in _memory(value):
        if step >= source.end:
            source.end, source.last_phase = step, phase

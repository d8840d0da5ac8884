"""What a step's forward does, once traced: it is checked, and never traced again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.compat import jaxprs
from jshard.compat.jaxprs import axes_of, groups_of, has, line_of, open_inner, replay
from jshard.errors import UserError
from jshard.fsdp.mesh import manual_axes
from jshard.fsdp.policy import INPUTS, Names, Offload, Policy
from jshard.fsdp.state import ModelArrays
from jshard.layout.state_layout import Layout
from jshard.nn.count import Count
from jshard.nn.dropout import merge_state
from jshard.nn.loss import Means
from jshard.unit.dataflow import dependencies, loop, through, union
from jshard.unit.linearize import refuse_forward_mode
from jshard.unit.shards import noting_reads, tell_of_reads


def traced_once(run: Callable, *inputs: Any) -> tuple[core.ClosedJaxpr, Any]:
    """Returns the program of a step's model and loss, and its abstract results.

    Raises:
      UserError: a unit is differentiated in forward mode.
    """
    try:
        with noting_reads() as reads:
            traced, shapes = jax.make_jaxpr(run, return_shape=True)(*inputs)
        tell_of_reads(reads, traced)
        return traced, shapes
    except (NotImplementedError, TypeError) as error:
        if not jaxprs.is_of_forward_mode(error):
            raise
        line = jaxprs.line_of_error(error)
    refuse_forward_mode(line)


def once_checked(
    traced: Any, shapes: Any, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> tuple[Callable, "Needs"]:
    """Checks a forward, and returns it as a function.

    Args:
      traced: what ``jax.make_jaxpr`` made of ``run(*arrays, *inputs)``, which returns
        what ``terms_of`` does, and the next state or None.
      shapes: its abstract results.
      layout: of the parameters in ``arrays``.
      arrays: as one device has them.
      inputs: its examples, and maybe the index of the micro-batch.

    Returns:
      ``forward``, with the arguments of ``run``, which returns what has gradients, the
      totals of the loss's terms and the counts that are trained, and (Means, next
      state); and what the counts depend on.

    Raises:
      UserError: a weight, or a part of the next state, may differ by device, or the
        policy names an activation that there is none of.
    """
    _check_names(traced.jaxpr, layout.policy)
    _check_shards(traced.jaxpr, layout, arrays, inputs)
    differs = differing(traced.jaxpr, layout, arrays, inputs)
    _, _, of_weights, of_state = jax.tree.unflatten(jax.tree.structure(shapes), differs)
    if any(of_weights):
        raise UserError(
            "loss_fn: a weight of the loss is computed from a device's own examples; "
            "reduce what it is computed from with jshard.pmean, or multiply the total "
            "of the Mean by it"
        )
    if of_state is not None:
        equal = jax.tree.map(lambda _: False, arrays.model_state)
        for path, variable in nnx.to_flat_state(merge_state(equal, of_state)):
            if any(jax.tree.leaves(variable)):
                name = ".".join(map(str, path))
                raise UserError(
                    f"model state {name!r} may end the step different on each device; "
                    "reduce what it is computed from with jshard.pmean (nnx.BatchNorm: "
                    "leave axis_name out; callbacks: keep their results out of the "
                    "state)"
                )
    run, needs = replay(traced, shapes), needs_of_counts(traced.jaxpr, shapes, arrays)

    def forward(*args: Any) -> tuple[tuple[list, list], tuple]:
        loss, metrics, _, after = run(*args)
        means = [mean for _, mean in loss.terms]
        trained = [m.count for m, yes in zip(means, needs.params, strict=True) if yes]
        return ([m.total for m in means], trained), (Means(loss, metrics), after)

    return forward, needs


class Needs(NamedTuple):
    """What the counts of a loss depend on.

    Attributes:
      params: by term, whether its count is a float that depends on what is trained.
      state: whether any count depends on the model's state.
    """

    params: list[bool]
    state: bool


def needs_of_counts(jaxpr: core.Jaxpr, shapes: Any, arrays: ModelArrays) -> Needs:
    """Finds what the counts of a loss depend on; arguments as of ``once_checked``."""
    places = jax.tree.unflatten(jax.tree.structure(shapes), range(len(jaxpr.outvars)))
    sizes = [len(jax.tree.leaves(part)) for part in arrays]
    params, state = [], False
    for _, mean in places[0].terms:
        wanted = {*jax.tree.leaves(mean.count)}
        of_count = [i in wanted for i in range(len(jaxpr.outvars))]
        _, used = jaxprs.needed_for(jaxpr, of_count, effects=False)
        params.append(not isinstance(mean.count, Count) and any(used[: sizes[0]]))
        state |= any(used[sum(sizes[:2]) : sum(sizes)])
    return Needs(params, state)


def _check_names(jaxpr: core.Jaxpr, policy: Policy) -> None:
    """Checks that each name in a remat policy is that of some activation.

    Raises:
      UserError: a policy names an activation that the program does not have.
    """
    remats = list(policy.everywhere("remat").values())
    named = [remat.names for remat in remats if isinstance(remat, Names)]
    wanted = {name for names in named for name in names}
    if any(isinstance(remat, Offload) for remat in remats):
        wanted.discard(INPUTS)
    found = set(names_in(jaxpr)) if wanted else set()
    if unknown := sorted(wanted - found):
        raise UserError(
            f"policy.remat: no activation is named {', '.join(map(repr, unknown))} "
            "(with jax.ad_checkpoint.checkpoint_name); named are: "
            f"{', '.join(sorted(found)) or 'none'}"
        )


def _check_shards(
    jaxpr: core.Jaxpr, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> None:
    """Checks that no shard is mixed with a device's own examples before its gather.

    A device's gradient would be masked or scaled by what another device has: a
    ``lax.cond`` with a predicate for each example, under ``jax.vmap``, selects its
    operands by its predicate, and an operand may be a shard.

    Raises:
      UserError: such a shard is gathered.
    """
    axes = [axis for axis in manual_axes() if lax.axis_size(axis) > 1]
    of_axis = {axis: 1 << i for i, axis in enumerate(axes)}
    own = union(list(of_axis.values()))
    paths = [path for part in arrays[:2] for path, _ in nnx.to_flat_state(part)]
    shards = [of_axis.keys() & layout.places[path].differs_over() for path in paths]
    bits = [bool(shard) << len(axes) + i for i, shard in enumerate(shards)]
    bits += [0] * len(jax.tree.leaves(arrays.model_state))
    bits += [own if np.ndim(x) else 0 for x in jax.tree.leaves(inputs)]

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        if eqn.primitive.name == "optimization_barrier":
            return entering
        if eqn.primitive.name not in jaxprs.COLLECTIVES:
            return None
        for x in entering if eqn.primitive.name.startswith("all_gather") else ():
            if x & own and x > own:
                path = paths[(x >> len(axes)).bit_length() - 1]
                raise UserError(
                    f"weight {'.'.join(map(str, path))!r} is gathered after its shard "
                    "was combined with a device's own examples (jax.lax.cond or switch "
                    "with a predicate for each example, under jax.vmap, does that); "
                    "gather it before: full = jshard.gathered(module), and call that "
                    "inside"
                )
        summed = union([of_axis.get(axis, 0) for axis in axes_of(eqn)])
        if eqn.primitive.name in ("all_to_all", "ppermute", "ragged_all_to_all"):
            summed = 0
        return [union(entering) & own & ~summed] * len(eqn.outvars)

    dependencies(jaxpr, bits, rule)


def names_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the names of a jaxpr's activations, from ``checkpoint_name`` of JAX."""
    for eqn in jaxprs.nested(jaxpr.eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]


# Primitives that run code which JAX knows nothing of, or that draw from a state of the
# device: results may differ by device even if their inputs do not.
_OPAQUE = {"ffi_call", "io_callback", "pure_callback", "rng_uniform"}

# Primitives through which a parameter's shard reaches its gather.
_PASS_ON = {
    "convert_element_type",
    "device_put",
    "dynamic_slice",
    "host_array_as_device_array",
    "optimization_barrier",
    "reshape",
    "squeeze",
}


def differing(
    jaxpr: Any, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> list[bool]:
    """Returns whether each result of a step's program may differ by device.

    Arguments are as of ``once_checked``. Scalars among ``inputs`` are the same on every
    device.

    Raises:
      UserError: collectives run under a condition that may differ by device, or a unit
        is differentiated in forward mode.
    """
    axes = [axis for axis in manual_axes() if lax.axis_size(axis) > 1]
    bits = {axis: 1 << i for i, axis in enumerate(axes)}

    def over(names: Iterable[Any]) -> int:
        return sum(bits[axis] for axis in axes if axis in names)

    paths = [path for part in arrays[:2] for path, _ in nnx.to_flat_state(part)]
    names = [".".join(map(str, path)) for path in paths]
    differs = [over(layout.places[path].differs_over()) for path in paths]
    differs += [0] * len(jax.tree.leaves(arrays.model_state))
    differs += [over(axes) if np.ndim(x) else 0 for x in jax.tree.leaves(inputs)]

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        name, results = eqn.primitive.name, len(eqn.outvars)
        if name == "custom_lin":
            refuse_forward_mode(line_of(eqn, jaxpr.eqns))
        if name in jaxprs.COLLECTIVES or name == "axis_index":
            own = over(axes_of(eqn))
            equals = name in jaxprs.SUMS or name.startswith("all_gather")
            if equals and not groups_of(eqn):
                return [x & ~own for x in entering]
            return [union(entering) | own] * results
        if name == "optimization_barrier":
            return entering
        if name in _OPAQUE:
            return [over(axes)] * results
        if name == "cond" and entering[0] and has(eqn, jaxprs.COLLECTIVES):
            _refuse(eqn, jaxpr, names)
        if name == "while" and has(eqn, jaxprs.COLLECTIVES):
            condition, out = loop(eqn, entering, rule)
            if condition:
                _refuse(eqn, jaxpr, names)
            return out
        return None

    return list(map(bool, dependencies(jaxpr, differs, rule)))


def _refuse(eqn: Any, jaxpr: Any, names: Sequence[str]) -> NoReturn:
    name, line = _gathered_in(eqn, jaxpr, names), line_of(eqn, jaxpr.eqns)
    if name is None:
        raise UserError(
            f"{line}: a branch or loop has collectives inside, and its "
            "condition may differ by device, so that some devices would wait for the "
            "others; make the condition equal on all devices (jshard.pmean of what it "
            "is computed from), or move the collectives out"
        )
    module, _, _ = name.rpartition(".")
    raise UserError(
        f"{line}: a branch or loop calls {module or 'a unit'!r}, which gathers "
        f"{name!r} with all devices, and its condition may differ by device; gather it "
        "before (full = jshard.gathered(module)) and call that inside, or make the "
        "condition equal on all devices (jshard.pmean of what it is computed from)"
    )


def _gathered_in(outer: Any, jaxpr: Any, names: Sequence[str]) -> str | None:
    """Returns the name of a parameter that is gathered inside the equation ``outer``.

    Each parameter has two bits: one that shards keep on their way to a gather, and one
    for all that is computed from what ``outer`` gathers.
    """
    number = len(names)
    of_shards = (1 << number) - 1

    def inside(
        eqn: Any, entering: list[int], *, marks: bool = True
    ) -> list[int] | None:
        name, bits = eqn.primitive.name, union(entering)
        if name.startswith("all_gather"):
            gathered = (bits & of_shards) << number if marks else 0
            return [bits & ~of_shards | gathered] * len(eqn.outvars)
        if open_inner(eqn) is not None or name in ("scan", "while", "cond"):
            return None
        return [bits if name in _PASS_ON else bits & ~of_shards] * len(eqn.outvars)

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        if eqn is outer:
            return through(eqn, entering, inside)
        return inside(eqn, entering, marks=False)

    bits = [1 << i for i in range(number)]
    bits += [0] * (len(jaxpr.invars) - number)
    found = union(dependencies(jaxpr, bits, rule)) >> number
    return names[found.bit_length() - 1] if found else None

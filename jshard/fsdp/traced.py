"""What a step's forward does, once traced: it is checked, and never traced again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.compat import jaxprs
from jshard.compat.jaxprs import (
    axes_of,
    groups_of,
    has,
    line_of,
    open_inner,
    replay,
    scopes_of,
)
from jshard.errors import UserError
from jshard.fsdp.mesh import manual_axes, sequence_axes
from jshard.fsdp.policy import INPUTS, Names, Offload, Policy
from jshard.fsdp.scopes import BESIDE_TOKENS
from jshard.fsdp.state import ModelArrays
from jshard.layout.state_layout import Layout
from jshard.nn.count import Count
from jshard.nn.dropout import merge_state
from jshard.nn.loss import Mean, Means
from jshard.pipe import call as pipe
from jshard.unit.dataflow import dependencies, loop, through, union


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


# Primitives that only change the form of a number.
_FORMS = frozenset(
    "and broadcast_in_dim concatenate convert_element_type copy neg reshape "
    "shift_right_arithmetic squeeze stack".split()
)


def check_means(jaxpr: core.Jaxpr, shapes: Any) -> None:
    """Checks that no metric is a maximum over devices that is averaged over batches.

    Arguments are as of ``once_checked``, for a program of several (micro-)batches.

    Raises:
      UserError: a Mean has the result of ``lax.pmax`` or ``lax.pmin`` as its total.
    """

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        name = eqn.primitive.name
        if name in ("pmax", "pmin"):
            return [1] * len(eqn.outvars)
        if name in _FORMS or open_inner(eqn) is not None:
            return None
        return [0] * len(eqn.outvars)

    found = dependencies(jaxpr, [0] * len(jaxpr.invars), rule)
    _, metrics, *_ = jax.tree.unflatten(jax.tree.structure(shapes), found)
    for name, metric in metrics.items():
        if isinstance(metric, Mean) and any(jax.tree.leaves(metric.total)):
            raise UserError(
                f"loss_fn: metric {name!r} is a largest or smallest value of all "
                "devices (pmax, pmin), which a Mean would average over batches and "
                "micro-batches; return jshard.nn.Max(jnp.max(x)), without pmax, or "
                "jshard.nn.Max(-jnp.min(x))"
            )


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
        if eqn.primitive is pipe.LAYERS:  # which gather their shards themselves
            return [union(entering) & own] * len(eqn.outvars)
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
      UserError: collectives run under a condition that may differ by device, a unit is
        differentiated in forward mode, ``tensor_parallel`` is given a table like its
        tokens, or a random key in the model's state is an array of integers.
    """
    axes = [axis for axis in manual_axes() if lax.axis_size(axis) > 1]
    if axes or layout.policy.accumulate > 1:
        _check_keys(jaxpr, arrays)
    bits = {axis: 1 << i for i, axis in enumerate(axes)}

    def over(names: Iterable[Any]) -> int:
        return sum(bits[axis] for axis in axes if axis in names)

    paths = [path for part in arrays[:2] for path, _ in nnx.to_flat_state(part)]
    names = [".".join(map(str, path)) for path in paths]
    differs = [over(layout.places[path].differs_over()) for path in paths]
    differs += [0] * len(jax.tree.leaves(arrays.model_state))
    whole = over([axis for axis in axes if axis not in sequence_axes()])
    of_inputs = (0, whole, over(axes))  # by dimensions
    differs += [of_inputs[min(np.ndim(x), 2)] for x in jax.tree.leaves(inputs)]
    beside_tokens: dict[int, tuple[Any, bool]] = {}  # in the end: loops are repeated

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        name, results = eqn.primitive.name, len(eqn.outvars)
        if name == "custom_lin":
            raise UserError(
                f"{line_of(eqn)}: forward-mode differentiation (jax.jvp, jax.jacfwd, "
                "jax.linearize) of a jshard unit, or another function with a "
                "custom_vjp; use jax.vjp or jax.grad, which nest, or call what "
                "jshard.gathered(unit) returns"
            )
        if name in jaxprs.COLLECTIVES or name == "axis_index":
            own = over(axes_of(eqn))
            equals = name in jaxprs.SUMS or name.startswith("all_gather")
            if BESIDE_TOKENS in scopes_of(eqn):
                beside_tokens[id(eqn)] = eqn, bool(union(entering) & own)
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

    found = dependencies(jaxpr, differs, rule)
    for eqn, are_tokens in beside_tokens.values():
        if not are_tokens:
            raise UserError(
                f"tensor_parallel: fn is given {eqn.invars[0].aval}, which begins like "
                "its tokens, but is the same on all devices; if it is not of tokens, "
                "let fn close over it, so that it stays whole; if it is, make it in fn "
                "from the shape of the tokens there"
            )
    return list(map(bool, found))


def _check_keys(jaxpr: core.Jaxpr, arrays: ModelArrays) -> None:
    """Raises UserError if integers in the model's state are used as a random key.

    Such a key (``jax.random.PRNGKey``) looks like other integers, so that no device or
    micro-batch is folded into it, and all would draw the same mask.
    """
    flat = [x for part in arrays[1:] for x in nnx.to_flat_state(part)]
    paths = [path for path, variable in flat for _ in jax.tree.leaves(variable)]
    values = jax.tree.leaves(arrays[1:])
    bits = [(x.dtype == np.uint32 and x.ndim > 0) << i for i, x in enumerate(values)]
    if not any(bits):
        return

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        if eqn.primitive.name != "random_wrap" or not entering[0]:
            return None
        name = ".".join(map(str, paths[entering[0].bit_length() - 1]))
        raise UserError(
            f"model state {name!r} is a random key as integers (jax.random.PRNGKey), "
            "with which every device and micro-batch would draw the same numbers for "
            "its examples; make it a typed key (jax.random.key), into which jshard "
            "folds these"
        )

    bits = [0] * len(jax.tree.leaves(arrays[0])) + bits
    dependencies(jaxpr, bits + [0] * (len(jaxpr.invars) - len(bits)), rule)


def _refuse(eqn: Any, jaxpr: Any, names: Sequence[str]) -> NoReturn:
    name = _gathered_in(eqn, jaxpr, names)
    if name is None:
        raise UserError(
            f"{line_of(eqn)}: a branch or loop has collectives inside, and its "
            "condition may differ by device, so that some devices would wait for the "
            "others; make the condition equal on all devices (jshard.pmean of what it "
            "is computed from), or move the collectives out"
        )
    module, _, _ = name.rpartition(".")
    raise UserError(
        f"{line_of(eqn)}: a branch or loop calls {module or 'a unit'!r}, which gathers "
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

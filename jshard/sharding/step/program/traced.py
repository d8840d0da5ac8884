"""What a step's forward does, once traced: it is checked, and never traced again."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.sharding.collectives.shards import noting_reads
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.values.random_streams import merge_state
from jshard.sharding.settings.count import Count
from jshard.sharding.settings.loss import Means
from jshard.sharding.settings.mesh import manual_axes, sequence_axes
from jshard.sharding.settings.scopes import BESIDE_TOKENS
from jshard.sharding.settings.state import ModelArrays
from jshard.sharding.step.program import mistakes
from jshard.sharding.step.program.draws import check_draws
from jshard.sharding.step.program.refusals import check_keys, check_names, check_shards
from jshard.sharding.units.linearize import refuse_forward_mode
from jshard.system.compat import jaxprs
from jshard.system.compat.jaxprs import (
    axes_of,
    groups_of,
    has,
    open_inner,
    scopes_of,
)
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies, loop, through, union
from jshard.system.errors import UserError


@contextlib.contextmanager
def tracing() -> Iterator[list[tuple[str, str]]]:
    """Traces of a step's model and loss go within; yields what ``tell_of_reads`` takes.

    Raises:
      UserError: a unit is differentiated in forward mode, a layer names axes that it
        cannot split anything over, or as ``mistakes.say``.
    """
    try:
        with noting_reads() as reads:
            yield reads
    except mistakes.RAISED as error:
        mistakes.say(error)


def once_checked(
    traced: Any, shapes: Any, layout: Layout, arrays: ModelArrays, inputs: tuple
) -> "Forward":
    """Checks a forward, and returns it as a function.

    Args:
      traced: what ``jax.make_jaxpr`` made of ``run(*arrays, *inputs)``, which returns
        what ``terms_of`` does, and the next state or None.
      shapes: its abstract results.
      layout: of the parameters in ``arrays``.
      arrays: as one device has them.
      inputs: its examples, and maybe the index of the micro-batch.

    Raises:
      UserError: a weight, or a part of the next state, may differ by device, or the
        policy names an activation that there is none of.
    """
    check_names(traced.jaxpr, layout.policy)
    check_shards(traced.jaxpr, layout, arrays, inputs)
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
    needs = needs_of_counts(traced.jaxpr, shapes, arrays)
    return Forward(core.jaxpr_as_fun(traced), traced, shapes, needs)


class Forward(NamedTuple):
    """A forward that was traced and checked: ``forward(*arrays, *inputs)``.

    Attributes:
      run: evaluates the program: leaves of the arguments to leaves of the results.
      program: as it was traced.
      shapes: the abstract results: the loss, the named Means, the weights of terms that
        the step computes, and the next state.
      needs: what the counts of the loss depend on.
    """

    run: Callable[..., list]
    program: core.ClosedJaxpr
    shapes: Any
    needs: "Needs"

    def __call__(self, *args: Any) -> tuple[tuple[list, list], tuple[Means, Any]]:
        """Returns what has gradients, and (Means, next state).

        The former are the totals of the loss's terms, and the counts that are trained.
        """
        leaves = map(jnp.asarray, self.run(*jax.tree.leaves(args)))
        results = jax.tree.unflatten(jax.tree.structure(self.shapes), leaves)
        loss, metrics, _, after = results
        terms = zip(loss.terms, self.needs.params, strict=True)
        trained = [mean.count for (_, mean), yes in terms if yes]
        totals = [mean.total for _, mean in loss.terms]
        return (totals, trained), (Means(loss, metrics), after)


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


# Primitives that run code which JAX knows nothing of, or that draw from a state of the
# device: results may differ by device even if their inputs do not.
_OPAQUE = {"ffi_call", "io_callback", "pure_callback", "rng_uniform"}

# Collectives whose transposes run over the same axes. A gather's may sum over further
# ones: those on which devices have the same shard.
_TRANSPOSED_ALIKE = {"all_to_all", "ppermute"}

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
        tokens, a random key in the model's state is an array of integers, or as
        ``check_draws``.
    """
    axes = [axis for axis in manual_axes() if lax.axis_size(axis) > 1]
    if axes or layout.policy.accumulate > 1:
        check_keys(jaxpr, arrays)
    check_draws(jaxpr, arrays, inputs, layout.policy.accumulate)
    bits = {axis: 1 << i for i, axis in enumerate(axes)}

    def over(names: Iterable[Any]) -> int:
        return sum(bits[axis] for axis in axes if axis in names)

    def inside(outer: Any) -> int:
        """The axes over which the devices that run ``outer`` must agree."""
        found = 0
        for eqn in jaxprs.nested([outer]):
            if (name := eqn.primitive.name) in jaxprs.COLLECTIVES:
                found |= over(axes_of(eqn) if name in _TRANSPOSED_ALIKE else axes)
        return found

    paths = [path for part in arrays[:2] for path, _ in nnx.to_flat_state(part)]
    names = [".".join(map(str, path)) for path in paths]
    differs = [over(layout.places[path].differs_over()) for path in paths]
    differs += [0] * len(jax.tree.leaves(arrays.model_state))
    whole = over([axis for axis in axes if axis not in sequence_axes()])
    of_inputs = (0, whole, over(axes))  # by dimensions
    differs += [of_inputs[min(np.ndim(x), 2)] for x in jax.tree.leaves(inputs)]

    def rule(eqn: Any, entering: list[int], *, final: bool = False) -> list[int] | None:
        name, results = eqn.primitive.name, len(eqn.outvars)
        if name == "custom_lin":
            refuse_forward_mode(lines.line_of(eqn, jaxpr.eqns))
        if name in jaxprs.COLLECTIVES or name == "axis_index":
            own = over(axes_of(eqn))
            equals = name in jaxprs.SUMS or name.startswith("all_gather")
            beside_tokens = final and BESIDE_TOKENS in scopes_of(eqn)
            if beside_tokens and not union(entering) & own:
                raise UserError(
                    f"tensor_parallel: tokens= names {eqn.invars[0].aval}, which is "
                    "the same on all devices, as no part of a sequence is; leave its "
                    "name out, or make it in fn from the shape of the tokens there"
                )
            if equals and not groups_of(eqn):
                return [x & ~own for x in entering]
            return [union(entering) | own] * results
        if name == "optimization_barrier":
            return entering
        if name in _OPAQUE:
            return [over(axes)] * results
        if name == "cond" and entering[0] & inside(eqn):
            _refuse(eqn, jaxpr, names)
        if name == "while" and has(eqn, jaxprs.COLLECTIVES):
            condition, out = loop(eqn, entering, rule, last if final else None)
            if condition & inside(eqn):
                _refuse(eqn, jaxpr, names)
            return out
        return None

    last = functools.partial(rule, final=True)
    return list(map(bool, dependencies(jaxpr, differs, rule, last=last)))


def _refuse(eqn: Any, jaxpr: Any, names: Sequence[str]) -> NoReturn:
    name, line = _gathered_in(eqn, jaxpr, names), lines.line_of(eqn, jaxpr.eqns)
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

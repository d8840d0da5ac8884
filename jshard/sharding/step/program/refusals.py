"""What a step's program must not have; the checks only read it."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core

from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.pipeline import call as pipe
from jshard.sharding.settings.loss import Mean
from jshard.sharding.settings.mesh import FSDP, PIPE, REPLICA, manual_axes
from jshard.sharding.settings.policy import INPUTS, Names, Offload, Policy
from jshard.sharding.settings.scopes import COUNTED, EXCHANGE_TOKENS, LOOK_UP
from jshard.sharding.settings.state import ModelArrays
from jshard.system.compat import jaxprs
from jshard.system.compat.jaxprs import axes_of, open_inner, scopes_of
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies, union
from jshard.system.errors import UserError


def check_names(jaxpr: core.Jaxpr, policy: Policy) -> None:
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


def names_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the names of a jaxpr's activations, from ``checkpoint_name`` of JAX."""
    for eqn in jaxprs.nested(jaxpr.eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]


def check_shards(
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


def check_keys(jaxpr: core.Jaxpr, arrays: ModelArrays) -> None:
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


_APART = (COUNTED, EXCHANGE_TOKENS, LOOK_UP)  # each example's results are its own


def check_apart(jaxpr: core.Jaxpr, batch: Any) -> None:
    """Checks that what a device computes depends on no other device's examples.

    Arguments are as of ``once_checked``. Devices that share the tokens or features of
    an example are one here.

    Raises:
      UserError: examples of several devices are combined, but by ``jshard.pmean``.
    """
    number = len(jax.tree.leaves(batch))
    bits = [0] * (len(jaxpr.invars) - number)
    bits += [int(np.ndim(x) > 0) for x in jax.tree.leaves(batch)]
    outputs = [True] * len(jaxpr.outvars)
    jaxpr, used = jaxprs.needed_for(jaxpr, outputs, effects=False)

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        name = eqn.primitive.name
        if name == "optimization_barrier":
            return entering
        if name not in jaxprs.COLLECTIVES or not any(entering):
            return None
        apart = any(scope in scopes_of(eqn) for scope in _APART)
        if not apart and {REPLICA, FSDP, PIPE} & {*axes_of(eqn)}:
            raise UserError(
                f"{lines.line_of(eqn, jaxpr.eqns)}: {name} combines the examples of "
                "several devices, and the last examples of an evaluation are fewer "
                "than the devices, which copies would fill up; evaluate a multiple of "
                "them, or use jshard.pmean, which leaves copies out"
            )
        return None

    dependencies(jaxpr, [x for x, yes in zip(bits, used, strict=True) if yes], rule)


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

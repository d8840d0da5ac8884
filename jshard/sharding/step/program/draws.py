"""Random numbers of a step: the ``rngs`` that a loss takes, and draws of examples."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from jshard.sharding.settings.mesh import manual_axes, shared_axes
from jshard.sharding.settings.scopes import TENSOR_PARALLEL
from jshard.sharding.step.program.example_keys import (
    THREEFRY,
    is_of_examples,
    key_of_examples,
)
from jshard.system.compat import jaxprs
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies
from jshard.system.errors import UserError

_DRAWS = ("random_bits", "random_gamma")


def with_rngs(
    fn: Callable, batch: Any, specs: Any, seed: int, step: jax.Array
) -> tuple:
    """Returns ``fn(model, batch)``, and a batch for it, with ``rngs`` if it takes them.

    These are new in each step, and their keys are those of ``key_of_examples``. The
    third result is the specs of that batch.

    Raises:
      UserError: ``fn`` cannot be called so.
    """
    given = {"rngs": None} if _takes_rngs(fn) else {}
    try:
        inspect.signature(fn).bind(None, batch, **given)
    except TypeError as error:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise UserError(
            f"{name} is called with a model and a batch, and with rngs= if it names "
            f"that argument, and cannot be: {error}"
        ) from error
    except ValueError:  # the signature is not known
        pass
    if not given:
        return fn, batch, specs

    def run(model: Any, batch_and_key: tuple[Any, jax.Array]) -> Any:
        batch, key = batch_and_key
        key = key_of_examples(key, _examples(batch))
        return fn(model, batch, rngs=nnx.Rngs(key))

    key = jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), step)
    return run, (batch, key), (specs, PartitionSpec())


def _takes_rngs(fn: Callable) -> bool:
    try:
        return "rngs" in inspect.signature(fn).parameters
    except ValueError:
        return False


def _examples(batch: Any) -> int:
    """Returns how many examples arrays of a batch have."""
    return next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))


def check_draws(jaxpr: core.Jaxpr, arrays: Any, inputs: tuple, accumulate: int) -> None:
    """Checks that no random numbers of examples are those of other examples, too.

    Arguments are as of ``once_checked``; the last input of a step with micro-batches is
    their index.

    Raises:
      UserError: numbers of the shape (examples, ...) are drawn with a key that is the
        same on all devices or in all micro-batches; or a key of ``rngs`` draws what is
        neither of that shape nor shared by all examples.
    """
    if not jaxprs.find(jaxpr.eqns, _DRAWS):
        return
    axes = {*manual_axes()} - {*shared_axes()}
    batch, *index = inputs
    examples = _examples(batch)
    devices, micro_batches = 1, 2  # bits: by what a value differs
    needed = devices * any(lax.axis_size(axis) > 1 for axis in axes)
    needed |= micro_batches * bool(index and accumulate > 1)
    bits = [0] * len(jax.tree.leaves(arrays))
    bits += [needed if np.ndim(x) else 0 for x in jax.tree.leaves(batch)]
    bits += [micro_batches for _ in index]

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        if eqn.primitive.name == "optimization_barrier":
            return entering
        here = eqn.primitive.name == "axis_index" and axes & {*jaxprs.axes_of(eqn)}
        return [devices] if here else None

    def check(eqn: Any, entering: list[int]) -> list[int] | None:
        if eqn.primitive.name not in _DRAWS:
            return rule(eqn, entering)
        if is_of_examples(eqn.invars[0].aval.dtype):
            _check_draw_of_rngs(eqn, jaxpr, examples)
        elif missing := needed & ~entering[0]:
            where = "on all devices" if missing & devices else "in all micro-batches"
            _check_same_draw(eqn, jaxpr, examples, where)
        return None

    dependencies(jaxpr, bits, rule, last=check)


def _check_same_draw(eqn: Any, jaxpr: core.Jaxpr, examples: int, where: str) -> None:
    result = eqn.outvars[0].aval
    if result.shape[:1] != (examples,):
        return
    raise UserError(
        f"{lines.line_of(eqn, jaxpr.eqns)}: random numbers of {list(result.shape)} are "
        f"drawn with a key that is the same {where}; a device has {examples} examples, "
        "and different ones would get the same numbers; let the loss take rngs (def "
        "loss_fn(model, batch, rngs)), which the step fills, and draw with them; what "
        f"is not of examples is drawn as {[1, *result.shape]}, and its [0] taken"
    )


def _check_draw_of_rngs(eqn: Any, jaxpr: core.Jaxpr, examples: int) -> None:
    key, shape = eqn.invars[0].aval, eqn.params.get("shape")
    split = TENSOR_PARALLEL in jaxprs.scopes_of(eqn)
    of_examples = shape is not None and shape[:1] == (examples,)
    for_all = shape is not None and not key.ndim and shape[:1] in ((), (1,))
    if (of_examples or for_all) and not split:
        return
    what = "a gamma distribution" if shape is None else f"{list(shape)}"
    if key.ndim:
        what += f" for each of {list(key.shape)} keys"
    if split:
        what += " within tensor_parallel"
    raise UserError(
        f"{lines.line_of(eqn, jaxpr.eqns)}: rngs of the step draw {what}; they draw "
        f"for a device's {examples} examples, as [{examples}, ...], or for all "
        "examples alike, as [1, ...] or a scalar, so that nothing depends on the "
        "mesh; draw in one of these shapes, outside of jax.vmap and tensor_parallel, "
        "or make a key of your own: jax.random.key(jax.random.bits(rngs()))"
    )

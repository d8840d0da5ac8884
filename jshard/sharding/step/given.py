"""Checks and adapts what states are made from: functions, models, optimizers, types."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.core import Tracer

from jshard.sharding.layout.specs import is_annotated
from jshard.sharding.layout.variables import (
    expose_arrays,
    is_variable,
    reachable,
    variables,
)
from jshard.sharding.settings.callers_mesh import taken
from jshard.sharding.settings.state import check_kept
from jshard.system.compat.flax_modules import is_pytree, record, unrecorded
from jshard.system.errors import UserError

_LINEN = "a Flax Linen module; wrap it in jshard.linen.Model (docs/how_to/linen.md)"


def from_seed(make_model: Any) -> Callable[[jax.Array], nnx.Module]:
    """Returns a function that makes a model from a seed, with ``make_model(rngs)``.

    Raises:
      UserError: (now, or when called) ``make_model`` is not such a function.
    """
    if isinstance(make_model, nnx.Module):
        raise UserError(
            f"make_model is a model that exists, a {type(make_model).__name__}; pass "
            "it to fsdp.from_model(model, optimizer), or pass a function that makes it "
            "from nnx.Rngs"
        )
    _refuse_linen("make_model is", make_model)
    if not callable(make_model):
        raise UserError(
            f"make_model is {_kind(make_model)}; it must be a function of nnx.Rngs "
            "that returns an nnx.Module, such as lambda rngs: Model(config, rngs=rngs)"
        )
    is_type = isinstance(make_model, type)
    called, given = (make_model.__init__, 2) if is_type else (make_model, 1)
    try:
        inspect.signature(called).bind(*[None] * given)
    except TypeError as error:
        name = getattr(make_model, "__qualname__", type(make_model).__name__)
        raise UserError(
            f"make_model is called with nnx.Rngs alone, and {name} cannot be: {error}; "
            "pass lambda rngs: Model(..., rngs=rngs)"
        ) from error
    except ValueError:  # the signature is not known
        pass

    def make(seed: jax.Array) -> nnx.Module:
        # layout/specs.py reads the annotations of further mesh axes; Flax must not
        # act on them.
        with nnx.use_eager_sharding(False):
            model = make_model(nnx.Rngs(jax.random.key(seed)))
        _refuse_linen("make_model returned", model)
        if not isinstance(model, nnx.Module):
            raise UserError(
                f"make_model returned {_kind(model)}; it must return an nnx.Module"
            )
        _check_is_new(model)
        _expose_parameters(model)
        expose_arrays(model)
        return model

    return make


def checked_seed(seed: Any) -> jax.Array:
    """Returns a seed as an array; raises UserError if 32 bits do not hold it."""
    if isinstance(seed, Integral) and int(seed) not in range(2**32):
        raise UserError(f"seed={seed}: give a whole number from 0 to 2**32 - 1")
    return jnp.asarray(seed, jnp.uint32)


def _check_is_new(model: nnx.Module) -> None:
    for _, variable in variables(model):
        try:
            variable.set_raw_value(variable.get_raw_value())
        except TraceContextError as error:
            raise UserError(
                "make_model returned a model that existed before it was called; pass "
                "that to fsdp.from_model(model, optimizer)"
            ) from error


def existing(model: Any) -> tuple[Callable[[nnx.State], nnx.Module], nnx.State]:
    """Returns a function that makes copies of ``model`` from its values, and these.

    Raises:
      UserError: it is not a model, or its arrays are not all on this process, or were
        donated with a state.
    """
    _refuse_linen("model is", model)
    if not isinstance(model, nnx.Module):
        raise UserError(
            f"model is {_kind(model)}; fsdp.from_model takes an nnx.Module that "
            "exists. A function that makes one goes to fsdp.init"
        )
    undo = _expose_parameters(model)
    graphdef, values = nnx.split(model)
    values = taken(values, None, "model")
    for restore in undo:
        restore()
    check_kept(values)
    for path, leaf in nnx.to_flat_state(values):
        for value in jax.tree.leaves(leaf):
            full = isinstance(value, (np.ndarray, np.generic, int, float, complex))
            if isinstance(value, jax.Array) and not isinstance(value, Tracer):
                full = value.is_fully_addressable
            if not full:
                raise UserError(
                    f"model: {'.'.join(map(str, path))!r} holds {_kind(value)}; "
                    "fsdp.from_model needs full arrays, in numpy or on devices of this "
                    "process"
                )

    def merge(values: nnx.State) -> nnx.Module:
        copy = nnx.merge(graphdef, values, copy=True)
        for _, variable in variables(copy):
            if is_annotated(variable):  # as in from_seed
                variable.set_metadata("eager_sharding", False)
        return copy

    return merge, values


def in_mode(model: nnx.Module, train: bool | None) -> nnx.Module:
    """Puts a model in train or eval mode, or if None, leaves all modes."""
    if train is not None:
        model.train() if train else model.eval()
    return model


def _expose_parameters(model: nnx.Module) -> list[Callable[[], None]]:
    """Makes Flax see all parameters; returns functions that undo it.

    A module that is not a pytree becomes one if it is given a derived type, as
    ``qwix.apply_lora_to_model`` does. All attributes that were set before then count as
    static, parameters included.
    """
    holds = lambda value: any(map(is_variable, reachable(value)))
    undo = []
    for module in reachable(model):
        if isinstance(module, nnx.Module) and is_pytree(type(module)):
            found = unrecorded(module).items()
            if names := [name for name, value in found if holds(value)]:
                undo.append(record(module, names))
    return undo


def check_optimizer(optimizer: Any) -> None:
    """Raises UserError unless ``optimizer`` is an optax transformation."""
    if isinstance(optimizer, nnx.Optimizer):
        raise UserError(
            "optimizer is an nnx.Optimizer; pass optimizer.tx, its optax "
            "transformation. Its state goes on with the model: "
            "fsdp.from_model(model, optimizer)"
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise UserError(
            f"optimizer is {_kind(optimizer)}; it must be an optax transformation, "
            "such as optax.adamw(1e-3)"
        )
    if getattr(optimizer.update, "__qualname__", "").startswith("lookahead.<locals>"):
        raise UserError(
            "optimizer is optax.lookahead, whose parameters are a pair, "
            "optax.LookaheadParams, which a state does not have; use the optimizer in "
            "it, and jshard.Policy(ema_decay=...) for slow weights"
        )


def check_unit_types(units: Any) -> tuple[type, ...]:
    """Returns the types in ``units``; raises UserError for anything else in it."""
    if not isinstance(units, (Sequence, Mapping, set, frozenset)):
        raise UserError(
            f"units is {_kind(units)}; it must be a tuple of module types, such as "
            "(Block,)"
        )
    for unit in units:
        if not (isinstance(unit, type) and issubclass(unit, nnx.Module)):
            raise UserError(
                f"units holds {_kind(unit)}; it must hold types of "
                "nnx.Modules" + (f": {_LINEN}" if _is_linen(unit) else "")
            )
    return tuple(units)


def _refuse_linen(what: str, value: Any) -> None:
    if _is_linen(value):
        raise UserError(f"{what} {_LINEN}")


def _is_linen(value: Any) -> bool:
    return issubclass(value if isinstance(value, type) else type(value), linen.Module)


def _kind(value: Any) -> str:
    """Describes a value by its type, for error messages."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the type {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"

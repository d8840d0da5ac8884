"""Tells what an optax transformation looks at, by the names of its parts.

A transformation is a pair of closures. Its update is told by the module and the name of
the function that made it, and those that it combines are among the variables that it
closes over. What has no name here counts as looking at everything.
"""

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jshard.errors import UserError

Update = Callable[..., tuple[Any, Any]]  # of an optax transformation


class Reach(enum.IntEnum):
    """What an update of a number depends on, besides scalars such as counts."""

    NUMBER = 0  # its own gradient, state and parameter
    TENSOR = 1  # those of its tensor: norms, means, factors
    EVERYTHING = 2


OF_NUMBERS = set(
    "add_decayed_weights clip ema identity keep_params_nonnegative reduce_on_plateau "
    "scale scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan "
    "scale_by_amsgrad scale_by_belief scale_by_lion scale_by_optimistic_gradient "
    "scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_schedule "
    "scale_by_sign scale_by_stddev scale_by_yogi set_to_zero trace".split()
)
OF_TENSORS = set(
    "adaptive_grad_clip centralize clip_by_block_rms scale_by_factored_rms "
    "scale_by_param_block_norm scale_by_param_block_rms scale_by_trust_ratio".split()
)
# What combines other transformations, and in which of its variables.
_COMBINED = {
    "chain": "update_fns",
    "masked": "inner",
    "partition": "transforms",
    "with_extra_args_support": "tx",
    "bf16_moments": "tx",
    "per_layer": "tx",
}
_MASKS = {"masked": "mask", "partition": "param_labels"}


def reach(update: Update, *, of_layers: bool = False) -> Reach:
    """Returns what an update looks at.

    ``of_layers`` asks about the layers of Stacks, which ``per_layer`` keeps apart
    whatever is in it: a layer then counts as a number does.
    """
    if of_layers and _name(update) == "per_layer":
        return Reach.NUMBER
    if inner := _inner(update):
        return max(reach(part, of_layers=of_layers) for part in inner)
    if _name(update) in OF_NUMBERS:
        return Reach.NUMBER
    return Reach.TENSOR if _name(update) in OF_TENSORS else Reach.EVERYTHING


def split(update: Update) -> tuple[list[Update], list[Update]]:
    """Splits a chain before its last stages, which all treat layers independently."""
    stages = _inner(update) if is_chain(update) else [update]
    number = len(stages)
    while number and reach(stages[number - 1], of_layers=True) == Reach.NUMBER:
        number -= 1
    return stages[:number], stages[number:]


def is_chain(update: Update) -> bool:
    """Returns whether an update is that of ``optax.chain``, with a tuple of states."""
    return _name(update) == "chain" and bool(_inner(update))


def across_layers(update: Update) -> str:
    """Returns the name of the first part that may look across layers."""
    for part in _inner(update):
        if reach(part, of_layers=True) != Reach.NUMBER:
            return across_layers(part)
    return getattr(update, "__qualname__", repr(update)).split(".")[0]


def check_masks(updates: list[Update], full: Any, cut: Any) -> None:
    """Raises UserError if a mask chooses otherwise in one layer than in a Stack.

    Parameters are ``full``, (L, ...) in Stacks of L layers, and ``cut`` to (1, ...).
    """
    for update in updates:
        if _name(update) == "per_layer":
            continue  # its masks see one layer's tensors in either case
        mask = _variable(update, _MASKS)
        if callable(mask) and _chosen(mask, full) != _chosen(mask, cut):
            name = getattr(mask, "__qualname__", repr(mask))
            raise UserError(
                f"policy.offload: the optimizer's mask {name} chooses otherwise in one "
                "layer of a Stack than in all of them, which are updated a layer at a "
                "time; let it look at paths or ranks rather than sizes, or wrap it in "
                "jshard.optim.per_layer, where it sees the tensors of one layer"
            )
        check_masks(_inner(update), full, cut)


def _chosen(mask: Callable[[Any], Any], params: Any) -> list[Any]:
    """Returns what a mask says of each parameter."""
    of_all = lambda chosen, below: jax.tree.map(lambda _: chosen, below)
    return jax.tree.leaves(jax.tree.map(of_all, mask(params), params))


def _name(update: Update) -> str:
    """Returns the name of optax's or jshard's function that made ``update``, or ""."""
    package, _, _ = (getattr(update, "__module__", None) or "").partition(".")
    known = package in ("optax", "jshard") and inspect.isfunction(update)
    return update.__qualname__.split(".")[0] if known else ""


def _variable(update: Update, names: Mapping[str, str]) -> Any:
    """Returns the variable of ``update`` that ``names`` has for it, or None."""
    name = names.get(_name(update))
    return name and inspect.getclosurevars(update).nonlocals.get(name)


def _inner(update: Update) -> list[Update]:
    """Returns the updates that ``update`` combines."""
    if _name(update) == "inject_hyperparams":
        # The update whose numbers it keeps in its state.
        given = inspect.getclosurevars(update).nonlocals
        factory, others = given["inner_factory"], given["other_hps"]
        names = inspect.signature(factory).parameters
        numbers = {name: 1.0 for name in names if name not in others}
        return [factory(**others, **numbers).update]
    inner: Any = _variable(update, _COMBINED) or ()
    if hasattr(inner, "update") and hasattr(inner, "init"):
        inner = [inner]
    parts = inner.values() if isinstance(inner, Mapping) else inner
    return [getattr(part, "update", part) for part in parts]

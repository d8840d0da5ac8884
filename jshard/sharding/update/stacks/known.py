"""What optax's transformations look at, by their names.

A transformation is a pair of closures. It is told by the module and the name of the
function that made its update, and those that it combines are among the variables that
these closures have. What has no name here may look at everything.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax
import optax

from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.update.muon import on_whole_layers
from jshard.system.errors import UserError

Transformation: TypeAlias = optax.GradientTransformation
Combine: TypeAlias = Callable[[list[Transformation]], Transformation]

# An update of a number depends on its own gradient, state and parameter, and scalars.
OF_NUMBERS = frozenset(
    "add_decayed_weights clip ema identity keep_params_nonnegative reduce_on_plateau "
    "scale scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan "
    "scale_by_amsgrad scale_by_belief scale_by_lion scale_by_optimistic_gradient "
    "scale_by_radam scale_by_rms scale_by_rprop scale_by_rss scale_by_schedule "
    "scale_by_sign scale_by_stddev scale_by_yogi set_to_zero trace".split()
)
# An update depends on those of its tensor: norms, means, factors.
OF_TENSORS = frozenset(
    "adaptive_grad_clip centralize clip_by_block_rms scale_by_factored_rms "
    "scale_by_param_block_norm scale_by_param_block_rms scale_by_trust_ratio".split()
)
OF_LAYERS = OF_NUMBERS | {"per_layer"}
# An update is the same whether layers are in one array or in arrays of their own.
APART = OF_LAYERS | {"clip_by_global_norm"}
# They combine what treats layers so, and do no more than that with them.
_COMBINE = ("inject_hyperparams", "masked", "partition")


def unknown_part(tx: Transformation, known: Collection[str]) -> str | None:
    """Returns the name of the first part of ``tx`` that is not ``known``, or None."""
    if _name(tx) in known:
        return None
    if parts := _open(tx)[0]:
        return next(filter(None, (unknown_part(part, known) for part in parts)), None)
    return getattr(tx.update, "__qualname__", repr(tx.update)).split(".")[0]


def stages_of(tx: Transformation) -> list[Transformation] | None:
    """Returns what ``optax.chain`` was given, of which it has a tuple of states."""
    return _open(tx)[0] if _name(tx) == "chain" else None


def with_whole_layers(tx: Transformation) -> Transformation:
    """Returns ``tx`` with Muon's products on whole layers, and the same state.

    Raises:
      UserError: Muon is in a part that cannot be made anew.
    """
    if _name(tx) == "scale_by_muon":
        return on_whole_layers(tx, _closure(tx.update))
    parts, combine = _open(tx)
    new = list(map(with_whole_layers, parts))
    if all(a is b for a, b in zip(new, parts, strict=True)):
        return tx
    if combine is None:
        raise UserError(
            f"per_layer: put {_name(tx)} around it rather than into it, as in "
            "optax.inject_hyperparams(lambda learning_rate: jshard.optim.per_layer("
            "optax.contrib.muon(learning_rate)))(learning_rate=1e-3)"
        )
    return combine(new)


def to_ask(tx: Transformation) -> list[Transformation]:
    """Returns what of ``tx`` is not known to treat a Stack's layers as tensors.

    Of masks, the functions that choose are asked apart (``unequal_mask``).
    """
    if (name := _name(tx)) in APART:
        return []
    parts = _open(tx)[0]
    left = [part for whole in parts for part in to_ask(whole)]
    if name in ("chain", "with_extra_args_support", "bf16_moments"):
        return left
    return [] if name in _COMBINE and not left else [tx]


def unequal_mask(
    tx: Transformation, params: Any, one: Callable[[Any], Any]
) -> str | None:
    """Returns the name of a mask that chooses otherwise for ``one(params)``, or None.

    ``one`` takes one layer of each Stack.
    """

    def chosen(mask: Callable[[Any], Any], params: Any) -> list[Any]:
        of_all = lambda chosen, below: jax.tree.map(lambda _: chosen, below)
        return jax.tree.leaves(jax.tree.map(of_all, mask(params), params))

    if _name(tx) == "per_layer":
        return None  # its masks see one layer's tensors in either case
    given = _closure(tx.update)
    mask = given.get({"masked": "mask", "partition": "param_labels"}.get(_name(tx), ""))
    if callable(mask) and chosen(mask, params) != chosen(mask, one(params)):
        return getattr(mask, "__qualname__", repr(mask))
    found = (unequal_mask(part, params, one) for part in _open(tx)[0])
    return next(filter(None, found), None)


def check_masks(tx: Transformation, params: Any) -> None:
    """Raises UserError if a mask chooses otherwise in one layer than in a Stack."""

    def cut(variable: Any) -> Any:
        if not is_variable(variable) or not layer_dims(variable):
            return variable
        _, *shape = variable.get_value().shape
        return variable.copy(jax.ShapeDtypeStruct((1, *shape), variable.dtype))

    one = lambda params: jax.tree.map(cut, params, is_leaf=is_variable)
    if name := unequal_mask(tx, params, one):
        raise UserError(
            f"policy.offload: the optimizer's mask {name} chooses otherwise in one "
            "layer of a Stack than in all of them, which are updated a layer at a "
            "time; let it look at paths or ranks rather than sizes, or wrap it in "
            "jshard.optim.per_layer, where it sees the tensors of one layer"
        )


def _name(tx: Transformation) -> str:
    """Returns the name of optax's or jshard's function that made ``tx``, or ""."""
    package, _, _ = (getattr(tx.update, "__module__", None) or "").partition(".")
    ours = package in ("optax", "jshard") and inspect.isfunction(tx.update)
    return tx.update.__qualname__.split(".")[0] if ours else ""


def _closure(fn: Callable) -> dict[str, Any]:
    """Returns the variables of the function that made ``fn``, by name."""
    return dict(inspect.getclosurevars(fn).nonlocals) if inspect.isfunction(fn) else {}


def _open(tx: Transformation) -> tuple[list[Transformation], Combine | None]:
    """Returns what ``tx`` combines, and what combines others in the same way."""
    given, also = _closure(tx.update), "mask_compatible_extra_args"
    match _name(tx):
        case "chain":
            fns = zip(_closure(tx.init)["init_fns"], given["update_fns"], strict=True)
            parts = [optax.GradientTransformationExtraArgs(*pair) for pair in fns]
            return parts, lambda new: optax.chain(*new)
        case "masked":
            options = {also: _closure(given["maybe_mask_values"])[also]}
            return [given["inner"]], lambda new: optax.masked(
                *new, given["mask"], **options
            )
        case "partition":
            names, labels = given["transforms"], given["param_labels"]
            return list(names.values()), lambda new: optax.partition(
                dict(zip(names, new, strict=True)), labels, **{also: given[also]}
            )
        case "with_extra_args_support":
            return [given["tx"]], lambda new: new[0]
        case "per_layer" | "bf16_moments":
            return [given["tx"]], None
        case "inject_hyperparams":
            # The transformation whose numbers it keeps in its state.
            numbers = dict.fromkeys(given["sched_hps"], 1.0)
            numbers |= given["other_hps"] | _closure(tx.init)["numeric_hps"]
            return [given["inner_factory"](**numbers)], None
    return [], None

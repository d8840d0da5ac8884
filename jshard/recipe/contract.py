"""What a recipe's functions take and return, checked where they are called.

Otherwise a wrong value would fail far from its function, inside jshard or JAX.
"""

import contextlib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import optax
from flax import nnx
from ml_collections import ConfigDict

from jshard.recipe.schedule.learning_rate import by_step
from jshard.system.errors import UserError

ARGUMENTS = {
    "get_config": (),
    "make_model": ("config", "rngs"),
    "make_optimizer": ("config",),
    "loss_fn": ("model", "batch"),
    "make_data": ("config", "split"),
    "learning_rate": ("config",),
    "references": ("config",),
    "flops_per_token": ("config",),
    "sample": ("config",),
    "predict_fn": ("model", "batch"),
    "precompute": ("config",),
    "sample_images": ("config",),
    "units": ("config",),
    "tensor_splits": ("config",),
    "sequences": ("config",),
    "trainable": ("config",),
    "tracker": ("config",),
}


def check_signature(
    function: Callable[..., Any], name: str, arguments: tuple[str, ...]
) -> None:
    """Raises a UserError if a function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    given = {}
    if arguments == ("model", "batch") and "rngs" in signature.parameters:
        given["rngs"] = "rngs"  # which steps fill
    try:
        signature.bind(*arguments, **given)
    except TypeError as error:
        raise UserError(
            f"{name}{signature} is called as {name}({', '.join(arguments)}): {error}"
        ) from error


# Each of the following calls a function of a recipe, None where an optional one is
# missing, and raises a UserError if it does not return what it should.


def make_optimizer(
    function: Callable[[ConfigDict], Any], config: ConfigDict
) -> optax.GradientTransformation:
    """Returns the recipe's optimizer."""
    with _explained_warmup(config):
        optimizer = function(config)
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        expected = "an optax transformation, such as optax.adamw(1e-3)"
        if isinstance(optimizer, nnx.Optimizer):
            expected = "the optax transformation that it was made with, its tx"
        raise _wrong("make_optimizer(config)", optimizer, expected)
    return optimizer


def learning_rate(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> Callable[[int], float] | None:
    """Returns the recipe's schedule."""
    if function is None:
        return None
    with _explained_warmup(config):
        schedule: Any = function(config)
    if not callable(schedule):
        expected = "a schedule: a function of the step"
        raise _wrong("learning_rate(config)", schedule, expected)
    what = "the schedule of learning_rate(config)"
    check_signature(schedule, what, ("step",))
    rate: Any = schedule(0)
    try:
        float(rate)
    except (TypeError, ValueError) as error:
        raise _wrong(what, rate, "a number for step 0") from error
    return by_step(schedule)


@contextlib.contextmanager
def _explained_warmup(config: ConfigDict) -> Iterator[None]:
    """Says which keys leave optax's schedules no steps to decay over."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        warmup = config.get("optimizer", {}).get("warmup_steps", 0)
        if "decay_steps" not in str(error) or warmup < config.steps:
            raise
        raise UserError(
            f"--config.optimizer.warmup_steps={warmup}: the warm-up must be shorter "
            f"than the run, --config.steps={config.steps}"
        ) from error


def trainable(function: Callable[[ConfigDict], Any] | None, config: ConfigDict) -> Any:
    """Returns the NNX filter of the recipe's trained parameters."""
    if function is None:
        return nnx.Param
    found = function(config)
    try:
        nnx.filterlib.to_predicate(found)
    except (TypeError, ValueError) as error:
        expected = "a filter of Flax NNX, such as nnx.LoRAParam"
        raise _wrong("trainable(config)", found, expected) from error
    return found


def references(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> dict[str, float]:
    """Returns the recipe's reference losses by name."""
    if function is None:
        return {}
    found = function(config)
    if not isinstance(found, Mapping):
        raise _wrong("references(config)", found, "a dict of name to loss")
    for name, loss in found.items():
        if not isinstance(name, str) or not _is_number(loss):
            raise UserError(
                f"references(config) returned {name!r}: {loss!r}; it must return a "
                "dict of name to loss, a finite number"
            )
    return {name: float(loss) for name, loss in found.items()}


def flops_per_token(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> float | None:
    """Returns the recipe's FLOPs of one token, forward and backward."""
    if function is None:
        return None
    flops = function(config)
    if not _is_number(flops) or float(flops) <= 0:
        raise _wrong("flops_per_token(config)", flops, "a positive number")
    return float(flops)


def sample(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> tuple[Callable[..., Any], Any, Callable[..., str]] | None:
    """Returns the recipe's `(generate, prompts, decode)`."""
    found = function(config) if function is not None else None
    if found is None:
        return None
    is_triple = isinstance(found, tuple | list) and len(found) == 3
    if not is_triple or not callable(found[0]) or not callable(found[2]):
        raise _wrong("sample(config)", found, "(generate, prompts, decode), or None")
    generate, prompts, decode = found
    check_signature(generate, "generate of sample(config)", ("model", "prompts"))
    check_signature(decode, "decode of sample(config)", ("tokens",))

    @functools.wraps(decode)
    def to_text(tokens: Any) -> str:
        text = decode(tokens)
        if not isinstance(text, str):
            raise _wrong("decode of sample(config)", text, "a string")
        return text

    return generate, prompts, to_text


def precompute(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> Callable[..., Any] | None:
    """Returns what the recipe computes once for each example."""
    found = function(config) if function is not None else None
    if found is None:
        return None
    if not callable(found):
        raise _wrong("precompute(config)", found, "fn(model, batch), or None")
    check_signature(found, "fn of precompute(config)", ("model", "batch"))
    return found


def sample_images(
    function: Callable[[ConfigDict], Any] | None, config: ConfigDict
) -> tuple[Callable[..., Any], Any, Callable[..., str]] | None:
    """Returns the recipe's `(predict, batch, caption)`."""
    found = function(config) if function is not None else None
    if found is None:
        return None
    is_triple = isinstance(found, tuple | list) and len(found) == 3
    if (
        not is_triple
        or not callable(found[0])
        or not isinstance(found[1], Mapping)
        or "image" not in found[1]
        or not callable(found[2])
    ):
        expected = "(predict, batch with 'image', caption), or None"
        raise _wrong("sample_images(config)", found, expected)
    predict, batch, caption = found
    check_signature(predict, "predict of sample_images(config)", ("model", "batch"))
    check_signature(caption, "caption of sample_images(config)", ("i", "row"))
    return predict, batch, caption


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if getattr(value, "shape", None) == ():  # a scalar of NumPy or JAX
        value = value.item()
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _wrong(what: str, value: Any, expected: str) -> UserError:
    text = repr(value)
    shown = text if len(text) <= 60 and "\n" not in text else type(value).__name__
    return UserError(f"{what} returned {shown}; it must return {expected}")

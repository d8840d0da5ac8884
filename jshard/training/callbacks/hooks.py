"""Hooks: functions of the user's that a run calls while it trains."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jshard.recipe.contract import check_signature
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Peers
from jshard.training.report.run_files import read_metrics

# hook(trainer, step, metrics) returns what to log, by name, or None.
Hook: TypeAlias = Callable[[Any, int, Mapping[str, Any]], Mapping[str, Any] | None]


class StopTraining(Exception):
    """Raised by a hook, ends the run as done: saved, with its report.

    With several processes one that asks is enough, and all stop after the same step:
    the next one that is logged, or evaluated after.
    """


def early_stopping(
    metric: str = "eval_loss",
    patience: int = 3,
    *,
    best: str = "lowest",
    min_delta: float = 0.0,
) -> Hook:
    """Returns an `on_evaluation` hook that ends a run which no longer improves.

    It looks at all evaluations in the run's metrics, so that a run which was resumed
    stops where it would have without.

    Args:
      metric: A metric of evaluations.
      patience: The number of evaluations without a better one until the run stops.
      best: "lowest" or "highest".
      min_delta: By how much a value must be better to count.

    Raises:
      UserError: An argument is impossible, or (when called) there is no such metric.
    """
    if best not in ("lowest", "highest"):
        raise UserError(f"early_stopping: best={best!r} must be lowest or highest")
    if patience < 1 or min_delta < 0:
        raise UserError(
            f"early_stopping: {patience=} must be at least 1, and {min_delta=} at "
            "least 0"
        )
    sign = 1 if best == "lowest" else -1

    def stop_early(trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        if metric not in metrics:
            raise UserError(
                f"early_stopping: evaluations have no {metric!r}; they have "
                f"{', '.join(metrics)}"
            )
        lines = read_metrics(trainer.workdir, having=metric)
        values = [x[metric] for x in lines if x["step"] < step and metric in x]
        values.append(metrics[metric])
        waited, lowest = 0, np.inf
        for value in values:
            signed = np.nan if value is None else sign * value  # it was not finite
            better = signed < lowest - min_delta
            waited = 0 if better else waited + 1
            lowest = signed if better else lowest
        if waited >= patience:
            raise StopTraining(
                f"{metric} has not improved for {waited} evaluations; the {best} is "
                f"{sign * lowest:.4f}"
            )

    return stop_early


class Hooks:
    """The hooks of a run, and what they have asked for.

    Args:
      trainer: What hooks get as their first argument.
      peers: The processes of the run.
      **functions: One or several hooks by `on_step`, `on_evaluation` and
        `on_checkpoint`.

    Attributes:
      stop: Why the run is to stop; empty if it is not.
      error: What a hook raised, to be raised once the state is saved.

    Raises:
      UserError: There is no such kind of hook, or one cannot be called as it is.
    """

    def __init__(
        self, trainer: Any = None, peers: Peers | None = None, **functions: Any
    ):
        self._trainer, self._peers = trainer, peers or Peers()
        self._functions: dict[str, Sequence[Hook]] = {}
        for kind, given in functions.items():
            several = given if isinstance(given, list | tuple) else [given]
            for function in several:
                if not callable(function):
                    raise UserError(f"{kind}={function!r} is not a function")
                arguments = ("trainer", "step", "metrics")
                check_signature(function, f"{kind}: {_name(function)}", arguments)
            self._functions[kind] = several
        self.stop, self.error = "", None

    def call(self, kind: str, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the hooks of a kind; returns what they want to be logged.

        What a hook raises is kept in `stop` or `error`. With several processes an
        error is raised, for the others cannot wait with this one for a save.
        """
        logged: dict[str, Any] = {}
        for hook in self._functions.get(kind, ()):
            try:
                seen = {**metrics, **logged}  # of the hooks before it, too
                returned = hook(self._trainer, step, seen)
                logged |= _checked(returned, hook, kind, ("step", "time", *metrics))
            except StopTraining as asked:
                self.stop = self.stop or str(asked) or "a hook asked to stop"
            except Exception as error:
                if self._peers.count > 1:
                    raise
                self.error = self.error or error
        return logged

    def ends_after(self, step: int, *, agree: bool = True) -> bool:
        """Returns whether the run is to end after this step, in all processes alike.

        It is asked once per step. Where all processes are here (`agree`), one may ask
        for all.
        """
        if not any(self._functions.values()):
            return False
        if self._peers.count == 1:
            return bool(self.stop or self.error)
        if not agree:
            return False
        asked = self._peers.share("stop", self.stop)
        self.stop = next(filter(None, asked), "")
        return bool(self.stop)

    def at_end(self) -> None:
        """Raises what a hook raised, now that the state is saved."""
        if self.error is not None:
            raise self.error


def _checked(
    returned: Any, hook: Hook, kind: str, taken: Sequence[str]
) -> dict[str, Any]:
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise UserError(
            f"{kind}: {_name(hook)} returned {type(returned).__name__}; it must return "
            "a dict of what to log, or None"
        )
    logged = {}
    for name, value in returned.items():
        if name in taken:
            raise UserError(
                f"{kind}: {_name(hook)} returned {name!r}, which the run logs itself: "
                "choose another name"
            )
        if isinstance(value, str):
            logged[name] = value
            continue
        array = np.asarray(jax.device_get(value))
        if (array.ndim and not is_picture(array)) or array.dtype.kind not in "biuf":
            raise UserError(
                f"{kind}: {_name(hook)} returned {name!r} of shape {array.shape} and "
                f"{array.dtype}; numbers, text and pictures [height, width, 3] or "
                "[height, width] can be logged"
            )
        logged[name] = array if array.ndim else float(array)
    return logged


def is_picture(array: np.ndarray) -> bool:
    """Returns whether an array can be a picture: grey [H, W], or color [H, W, 3]."""
    return array.ndim == 2 or (array.ndim == 3 and array.shape[-1] == 3)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)

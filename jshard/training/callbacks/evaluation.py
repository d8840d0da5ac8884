"""Evaluations, traced before the first step to find mistakes early."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.cli.formatting import did_you_mean
from jshard.data.batches import eval_batches, has_weights
from jshard.data.iterables import Stream
from jshard.errors import RunFailed, UserError
from jshard.evaluate.in_runs import RunTasks
from jshard.fsdp.state import TrainState
from jshard.run.metrics import RunFolder
from jshard.run.progress import ProgressDisplay
from jshard.training.callbacks.hooks import Hooks
from jshard.training.callbacks.samples import Samples
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions


@dataclasses.dataclass
class Evaluation:
    """Evaluates every `eval_every` steps and after the last one."""

    run: PreparedRun
    recipe: RecipeFunctions
    log: StepLog
    folder: RunFolder
    display: ProgressDisplay
    hooks: Hooks
    samples: Samples

    def after_step(self, step: int) -> dict[str, float]:
        """Returns the metrics of an evaluation; none if there is none to make."""
        config = self.run.config
        if config.eval_every and (
            step == config.steps or step % config.eval_every == 0
        ):
            return self.evaluate(step)
        return {}

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluates, and samples; returns the metrics."""
        assert self.recipe.evaluate is not None
        with self.log.drained():
            self.run.peers.at("evaluating", step)
            values = self.recipe.evaluate(self.run.state)
            self.folder.write(step, values)
            self.display.evaluated(step, values)
            self.samples.after_evaluation(step, values["eval_loss"])
            self.folder.log(step, self.hooks.call("on_evaluation", step, values))
            self.folder.report()
        return values


def prepare_evaluation(
    run: PreparedRun,
    data: Any,
    steps: dict[Any, Any] | None = None,
    tasks: RunTasks | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Makes a recipe's evaluation, and traces it without computing anything.

    `steps` holds evaluation steps that were made before, by their loss, and `tasks`
    what else to score.

    Returns:
      A function from a state to the means over all examples: `eval_loss` and so on,
      and `eval_ema_loss` and so on if the state has averaged parameters.

    Raises:
      UserError: The data cannot be evaluated on, or `checkpoint.best` names none of
        the means.
    """
    fsdp, loss_fn, reader = run.job.fsdp, run.job.recipe.loss_fn, run.reader()
    steps = {} if steps is None else steps
    if loss_fn not in steps:
        steps[loss_fn] = fsdp.eval_step(loss_fn)
    eval_step = steps[loss_fn]
    limit = run.config.eval_batches or None

    def evaluate(state: TrainState) -> dict[str, float]:
        states = {"eval": state}
        if state.ema is not None:
            states["eval_ema"] = state.with_ema_params()
        values = {}
        for prefix, state in states.items():
            total: Any = 0
            read = eval_batches(data, max_batches=limit, **reader)
            for factor, batch in _agreed(data, read):
                previous = total
                means = eval_step(state, fsdp.shard_batch(run.filled(batch)))
                if factor < 0 and has_weights(batch) and means.leaves_out():
                    continue  # the copies weighed nothing
                total = total + (means if factor == 1 else means.scaled(factor))
                jax.block_until_ready(previous)  # run one batch ahead, as in training
            means = total.compute()
            scores = tasks(state) if tasks else {}
            values |= {f"{prefix}_{k}": x for k, x in (means | scores).items()}
            if not total.counted():
                raise RunFailed(
                    f"{prefix}_loss counts nothing: the counts of all its Means are 0; "
                    "look at what loss_fn counts, and at weights in the validation data"
                )
        return values

    first = eval_batches(data, max_batches=limit, num_threads=0, **reader)
    batch = fsdp.shard_batch(next(first)[1])
    means = jax.eval_shape(eval_step, run.abstract_state, batch)
    prefixes = ["eval"] if run.abstract_state.ema is None else ["eval", "eval_ema"]
    own = ("loss", *means.metrics, *(tasks.names if tasks else ()))
    names = [f"{prefix}_{name}" for prefix in prefixes for name in own]
    best = run.config.checkpoint.best
    if best and best not in names:
        raise UserError(
            f"--config.checkpoint.best={best}: evaluations have no such metric; they "
            f"have {', '.join(names)}{did_you_mean(best, names)}"
        )
    return evaluate


def _agreed(data: Any, read: Iterator[Any]) -> Iterator[Any]:
    """Yields batches; a UserError in all processes if a stream ends in some alone.

    Those would go on with the next training step, and the others wait for them.
    """
    if not isinstance(data, Stream) or jax.process_count() == 1:
        yield from read
        return
    for number in itertools.count():
        batch = next(read, None)
        there = multihost_utils.process_allgather(np.int32(batch is not None))
        if there.any() and not there.all():
            raise UserError(
                f"the validation data end after {number} batches in process "
                f"{there.argmin()}, and not in process {there.argmax()}: every process "
                "must read the same"
            )
        if batch is None:
            return
        yield batch

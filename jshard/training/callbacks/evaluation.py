"""Evaluations, traced before the first step to find mistakes early."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jshard.data.batches import eval_batches, last_sizes
from jshard.data.dataset import Dataset, Sets
from jshard.data.examples import count_rows
from jshard.data.iterables import Stream
from jshard.inference.evaluate.in_runs import RunTasks
from jshard.sharding.settings.mesh import groups_of_examples
from jshard.sharding.settings.state import TrainState
from jshard.system.errors import RunFailed, UserError
from jshard.system.formatting import did_you_mean
from jshard.training.callbacks.hooks import Hooks
from jshard.training.callbacks.samples import Samples
from jshard.training.callbacks.step_log import StepLog
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions
from jshard.training.run.metrics import RunFolder
from jshard.training.run.progress import ProgressDisplay


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
        settings = self.run.settings
        if settings.eval_every and (
            step == settings.steps or step % settings.eval_every == 0
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
    data: Sets | None,
    steps: dict[Any, Any] | None = None,
    tasks: RunTasks | None = None,
    best: str = "",
) -> Callable[[TrainState], dict[str, float]]:
    """Makes a recipe's evaluation, and traces it without computing anything.

    `steps` holds evaluation steps that were made before, by their loss, `tasks` what
    else to score, and `best` names the metric that the best checkpoint has.

    Returns:
      A function from a state to the means over all examples: `eval_loss` and so on,
      and `eval_ema_loss` and so on if the state has averaged parameters. Of data by
      name also those over each set, `eval_NAME_loss`.

    Raises:
      UserError: The data cannot be evaluated on, two metrics have one name, or
        `best` names none of them.
    """
    fsdp, process = run.job.fsdp, dict(run.reader())
    loss_fn = run.job.configured.recipe.loss_fn
    steps = {} if steps is None else steps
    sizes = {
        "batch_size": process.pop("batch_size"),
        "devices": groups_of_examples(fsdp.mesh),
        "max_batches": run.settings.eval_batches or None,
    }
    sets = data if isinstance(data, Mapping) else {"": data}

    def step_of(examples: int | None) -> Any:
        key = loss_fn, examples
        if key not in steps:
            seed = run.settings.seed
            steps[key] = fsdp.eval_step(loss_fn, seed, examples=examples)
        return steps[key]

    def total_of(state: TrainState, dataset: Dataset | None) -> Any:
        total: Any = 0
        read = eval_batches(dataset, **sizes, **process)
        for rows, examples in _agreed(dataset, read):
            previous = total
            batch = fsdp.shard_batch(run.filled(rows))
            total = total + step_of(examples)(state, batch)
            jax.block_until_ready(previous)  # run one batch ahead, as in training
        return total

    def evaluate(state: TrainState) -> dict[str, float]:
        states = {"eval": state}
        if state.ema is not None:
            states["eval_ema"] = state.with_ema_params()
        values = {}
        for prefix, state in states.items():
            totals = {name: total_of(state, one) for name, one in sets.items()}
            whole: Any = sum(totals.values())
            totals = {"": whole} | totals
            scores = tasks(state) if tasks else {}
            for name, total in totals.items():
                of_set = _joined(prefix, name)
                found = total.compute() | (scores if not name else {})
                values |= {f"{of_set}_{key}": x for key, x in found.items()}
                if not total.counted():
                    raise RunFailed(
                        f"{of_set}_loss counts nothing: the counts of all its Means "
                        "are 0; look at what loss_fn counts, and at weights in the "
                        "validation data"
                    )
        return values

    traced = {}
    for name, one in sets.items():
        rows, examples = next(eval_batches(one, num_threads=0, **sizes, **process))
        parts = process.get("process_count", 1)
        first = count_rows(rows) * parts, examples
        for size, examples in (first, *last_sizes(one, **sizes)):
            some = jax.tree.map(lambda x, n=size // parts: x[:n], rows)
            batch, step = fsdp.shard_batch(some), step_of(examples)
            traced[name] = step.eval_shape(run.abstract_state, batch)
    any_set = next(iter(traced.values()))
    own = {"": ("loss", *any_set.metrics, *(tasks.names if tasks else ()))}
    own |= {name: ("loss", *means.metrics) for name, means in traced.items() if name}
    _check_names(own, best, run.abstract_state.ema is not None)
    return evaluate


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if name else prefix


def _check_names(own: Mapping[str, Sequence[str]], best: str, averages: bool) -> None:
    """Checks the names of metrics, by the set that they are of."""

    def named(prefix: str) -> list[str]:
        return [f"{_joined(prefix, one)}_{key}" for one in own for key in own[one]]

    names = named("eval") + named("eval_ema")  # the latter are taken in any case
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two metrics of evaluations are called {twice[0]}: give another name to "
            f"one of the validation sets {', '.join(filter(None, own))}"
        )
    names = names if averages else named("eval")
    if best and best not in names:
        raise UserError(
            f"--config.checkpoint.best={best}: evaluations have no such metric; they "
            f"have {', '.join(names)}{did_you_mean(best, names)}"
        )


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

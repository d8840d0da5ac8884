"""A recipe's data and functions, tried out before anything is written."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jshard.data.batches import TrainingBatches, batches
from jshard.data.dataset import Dataset, Sets, rows_of_epoch
from jshard.data.files.noting import noted
from jshard.data.iterables import Stream
from jshard.data.stream_reader import StreamState, describe
from jshard.data.stream_state import read_state
from jshard.inference.evaluate.in_runs import RunTasks
from jshard.recipe import contract
from jshard.recipe.schedule.epochs import describe_epoch
from jshard.sharding.settings.state import TrainState
from jshard.training.agreement import agree, check_shared, facts_of
from jshard.training.callbacks.evaluation import prepare_evaluation
from jshard.training.callbacks.samples import prepare_pictures, prepare_sample
from jshard.training.callbacks.saving import check_room
from jshard.training.non_finite import beyond_vocabulary
from jshard.training.precomputed import precompute
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions
from jshard.training.run.loggers.services import check_loggers
from jshard.training.run.start import Start
from jshard.training.throughput import Throughput


def check_recipe(run: PreparedRun, start: Start) -> RecipeFunctions:
    """Makes and traces what a run needs; reads the first batch of each split.

    Raises:
      UserError: Something of it is wrong, or differs between the processes.
    """
    job, settings, peers = run.job, run.settings, run.peers
    abstract_state, reader = run.abstract_state, run.reader()
    recipe, config = job.configured.recipe, job.configured.config
    with noted() as taken:
        train_data = job.configured.training_data()
        eval_data = job.configured.validation_data()
    data = {"train": train_data, **by_split(eval_data)}
    _check_agreement(run, start, data)
    peers.at("reading the first batch", start.step)
    saved = run.stream_state if start.held else read_state(start.texts)
    run.stream_state = saved  # which a save before the first step stores again
    examples = run.examples if start.held else start.examples
    following = TrainingBatches(
        train_data,
        saved,
        start_step=start.step,
        num_steps=settings.steps,
        first_example=examples,
        **reader,
    )
    first = following.first
    if start.step:  # what is missing is an error before the state is restored
        run.filled(first.rows)
    processes = reader["process_count"]
    once = contract.precompute(recipe.precompute, config)
    sample = contract.sample(recipe.sample, config)
    pictures = contract.sample_images(recipe.sample_images, config)
    read = _note(train_data, saved, first.state, start, processes, settings.batch_size)
    checked = RecipeFunctions(
        batches=following,
        learning_rate=contract.learning_rate(recipe.learning_rate, config),
        throughput=Throughput(
            first.rows,
            job.fsdp.mesh,
            contract.flops_per_token(recipe.flops_per_token, config),
            done=start.step,
            examples=examples,
            rows=rows_of_epoch(train_data),
        ),
        precompute=once
        and (lambda state: precompute(once, job.fsdp, state, data, settings)),
        sample=sample and prepare_sample(run, *sample),
        pictures=pictures and prepare_pictures(run, *pictures),
        evaluate=_prepare_evaluation(run, start, eval_data),
        references=contract.references(
            recipe.references if jax.process_index() == 0 else None, config
        ),
        find_cause=_cause_finder(run, start.step, examples, train_data),
        note=("\n" + " " * 16).join(filter(None, [read, *taken])),
    )
    check_loggers(settings.logger)
    if settings.checkpoint.every and run.bucket is None:
        trained = dataclasses.replace(abstract_state, frozen=nnx.State({}))
        check_room(
            run.workdir, trained if settings.checkpoint.restore else abstract_state
        )
    return checked


def _note(
    data: Dataset,
    saved: StreamState | None,
    state: StreamState | None,
    start: Start,
    processes: int,
    batch_size: int,
) -> str:
    """Says how a stream is read, or how many steps are an epoch of other data."""
    if not isinstance(data, Stream):
        rows = rows_of_epoch(data)
        return describe_epoch(rows, batch_size) if rows else ""
    lost = "; the checkpoint has no state of it: it was read from its start"
    skipped = start.step and state and not saved
    return describe("train", data, state, processes) + (lost if skipped else "")


def by_split(data: Sets | None) -> dict[str, Dataset | None]:
    """Returns validation data by the name of the split, or the split and the set."""
    if not isinstance(data, Mapping):
        return {"validation": data}
    return {f"validation/{name}": one for name, one in data.items()}


def _check_agreement(run: PreparedRun, start: Start, data: Mapping[str, Any]) -> None:
    """Raises a UserError if the processes are about to do different things."""
    if run.peers.count == 1:
        return
    configured = run.job.configured
    recipe, keys, state = configured.recipe, configured.values, run.abstract_state
    facts = facts_of(recipe, keys, run.shown, start, state, data)
    agree(run.peers, facts)
    if run.settings.checkpoint.every and run.bucket is None:
        check_shared(run.peers, run.workdir / "logs")


def _prepare_evaluation(
    run: PreparedRun, start: Start, data: Any
) -> Callable[[TrainState], dict[str, float]] | None:
    if not run.settings.eval_every:
        return None
    tasks = None
    if run.settings.eval_tasks:
        run.peers.at("reading tasks", start.step)
        keys = run.job.configured.text
        tasks = RunTasks(run.settings, keys, run.job.fsdp, run.abstract_state)
    run.peers.at("reading the first evaluation batch", start.step)
    best = run.settings.checkpoint.best
    return prepare_evaluation(run, data, tasks=tasks, best=best)


def _cause_finder(
    run: PreparedRun, done: int, examples: int, data: Any
) -> Callable[[int], str]:
    model = run.job.fsdp.model(run.abstract_state)

    def find_cause(step: int) -> str:
        """Reads the batch of a step again, and looks for tokens out of range."""
        if isinstance(data, Stream):
            return ""  # it has gone by
        (batch,) = batches(
            data,
            start_step=step - 1,
            num_steps=step,
            first_example=examples + (step - 1 - done) * run.settings.batch_size,
            num_threads=0,
            **run.reader(),
        )
        return beyond_vocabulary(batch, model)

    return find_cause

"""One training run: from a recipe to metrics, checkpoints, a sample and a report."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial

import jax

from jshard.plan.start_up import describe
from jshard.recipe.make_config import changed_keys
from jshard.sharding.layout.batch import abstract_batch
from jshard.storage.checkpoint.restore import CHECKPOINTS
from jshard.storage.checkpoint.selected.best_step import best_of
from jshard.storage.checkpoint.selected.run_address import BEST
from jshard.system.cli.terminal import show
from jshard.system.files.lock import check_unlocked
from jshard.system.formatting import format_duration, one_line
from jshard.system.jobs.peers import Peers
from jshard.training.agreement import agree_on_program
from jshard.training.callbacks.evaluation import Evaluation
from jshard.training.callbacks.hooks import Hooks
from jshard.training.callbacks.local_saving import LocalSaving
from jshard.training.callbacks.pauses import Pauses
from jshard.training.callbacks.profiling import Profile
from jshard.training.callbacks.samples import Samples
from jshard.training.callbacks.saving import Saving
from jshard.training.callbacks.step_log import StepLog
from jshard.training.callbacks.stopping import Stopping
from jshard.training.check_recipe import check_recipe
from jshard.training.prepared_run import PreparedRun
from jshard.training.recipe_functions import RecipeFunctions
from jshard.training.report.goodput import read_goodput
from jshard.training.run.account import Account
from jshard.training.run.bucket import Copying
from jshard.training.run.metrics import RunFolder, finish_folder
from jshard.training.run.progress import ProgressDisplay
from jshard.training.run.start import Start
from jshard.training.watch.watching import Watching


@contextmanager
def displayed(
    steps: int, peers: Peers, waited: Mapping[str, float], account: Account
) -> Iterator[ProgressDisplay]:
    """Shows a run's progress within it, and what its first process waits for.

    `steps` is its length, and `waited` has the seconds that the process has spent so
    far, by what it did. `account` is told of all that it does.
    """

    def shown(phase: str, step: int) -> None:
        account.at(phase, step)
        display.at(phase, step)

    first = peers.index == 0
    with ProgressDisplay(steps, enabled=first, waited=waited) as display:
        peers.shown = shown
        try:
            yield display
        finally:
            peers.shown = None


def train(
    run: PreparedRun,
    display: ProgressDisplay,
    hooks: Hooks,
    account: Account,
    *,
    started: float,
    keeps_state: bool,
) -> None:
    """Trains a recipe's model; leaves metrics, checkpoints and a report in its folder.

    If the folder already holds this run, the run resumes from its newest checkpoint, or
    from the state at hand if that is as new. `run.state` is the state of the last step,
    however the run ends.

    Args:
      run: What to train, and where.
      display: Shows how far it is.
      hooks: The user's functions to call.
      account: Where the time goes.
      started: When the process started, as `time.time()`.
      keeps_state: Whether this process holds the state afterwards, so that a signal
        waits for the end of a step even if nothing is saved.

    Raises:
      UserError: The config, the recipe, its data or the run in the folder cannot be
        used.
      RunFailed: The loss is not finite, or the metrics or the last state cannot be
        written.
      Interrupted: A signal ended the run, and `checkpoint.every=0` saves nothing.
      Preempted: A signal ended the run, and its state is saved.
    """
    prepared = _prepare(run)
    if prepared is None:
        if (said := _end_at_best(run, keeps_state)) and jax.process_index() == 0:
            show(said)
        return
    start, recipe, watching, note = prepared
    source = run.restore(start)
    with (
        Stopping(run, hooks, keeps_state) as stopping,  # until the report is complete
        Copying(run.bucket, jax.process_index()) as copying,
        _open_folder(run, start) as folder,
        account.recorded(run.workdir, start.step, folder.reached),
        Pauses(account) as pauses,
        LocalSaving(run, start, folder, display) as local,
        Saving(run, folder, display, hooks, copying, source.frozen_from) as saving,
        Profile(run, start.step, recipe.throughput, display) as profile,
        StepLog(run, start.step, recipe, folder, display, started) as log,
        run.peers.telling(),
        closing(recipe.batches) as batches,  # ends the threads that read ahead
    ):
        samples = Samples(run, recipe, folder, display)
        evaluation = Evaluation(run, recipe, log, folder, display, hooks, samples)
        copying.start()
        stopping.listen()
        display.references = recipe.references
        display.say(
            "\n".join(filter(None, (start.message, note, watching.note, profile.note)))
        )
        configured = run.job.configured
        folder.note(
            recipe=configured.recipe.path,
            changed=changed_keys(configured.recipe, configured.config),
            start_up=note,
            references=recipe.references,
        )
        if run.state is None:  # of a new run
            run.peers.at("making initial values", start.step)
            run.state = source.start(run.job, run.abstract_state)
            display.say(source.message(run.state))
        if recipe.precompute is not None and not start.step:
            run.peers.at("computing what is kept", 0)
            run.precomputed = recipe.precompute(run.state)
            if jax.process_index() == 0:
                run.precomputed.save(run.workdir)

        watching.begin(start.step, recipe.batches.first.rows, folder, display)
        log.begin(run.state.opt_state)
        step, following = start.step, iter(batches)
        if start.unevaluated:
            saving.again(step, log, evaluation.evaluate(step))
            following = iter(()) if hooks.ends_after(step) else following
        recipe.throughput.restart()
        for step, batch in enumerate(following, start.step + 1):
            stopping.before_step(step)
            profile.before_step(step)
            run.peers.at("step" if step > start.step + 1 else "compiling", step)
            metrics = watching.train_step(step, batch, log, saving)
            run.peers.at("computing", step)
            account.dispatched(step, metrics)
            log.after_step(step, metrics, batch.waited, pauses.take())
            run.peers.at("hooks", step)
            profile.after_step(step)
            display.after_step(step, metrics)
            saving.report()
            returned = hooks.call("on_step", step, metrics)
            log.add_returned(step, returned | watching.metrics())
            watching.after_step(step, log)
            stopping.after_step(step, log, saving)
            evaluated = evaluation.after_step(step)
            ends = hooks.ends_after(step, agree=log.logs(step) or bool(evaluated))
            saving.after_step(step, log, evaluated, ends=ends)
            local.after_step(step, log, ends=ends)
            if ends:
                break
            run.peers.at("data", step)

        if hooks.error is None:
            stopping.at_end(step, folder, display)
            samples.at_end(step)
        saving.at_end(step)
        hooks.at_end()
    if goodput := read_goodput(run.workdir):
        display.say(one_line(str(goodput)))
    took = format_duration(time.time() - started)
    display.say(one_line(f"done in {took}, report: {run.shown}/report.html"))
    if log.skipped:
        display.say(f"{log.skipped} of {step} steps made no update (skipped_steps)")
    if said := _end_at_best(run, keeps_state):
        display.say(said)


def _end_at_best(run: PreparedRun, keeps_state: bool) -> str:
    """Loads the run's best checkpoint, if that is asked for; returns what it is.

    That is "" of a run that keeps none.
    """
    options = run.settings.checkpoint
    if not options.best:
        return ""
    if options.load_best and keeps_state:
        run.take(BEST)
    best = best_of(run.workdir / CHECKPOINTS)
    return str(best or f"best: no checkpoint has a finite {options.best}")


def _prepare(
    run: PreparedRun,
) -> tuple[Start, RecipeFunctions, Watching, str] | None:
    """Finds everything that can be wrong; returns None if the run is done.

    Only then is the folder written to, or a run that still saves in the same bucket
    ended: what that one has saved meanwhile is a new start.
    """
    while (start := _find_start(run)) is not None:
        recipe = check_recipe(run, start)
        watching = Watching(run)
        run.peers.at("setting up", start.step)
        note = _start_up_note(run, recipe)
        if not run.claim():
            return start, recipe, watching, note
        recipe.batches.close()
    return None


def _find_start(run: PreparedRun) -> Start | None:
    """Finds where the run starts; says so and returns None if it is done."""
    first = jax.process_index() == 0
    if first:
        check_unlocked(run.workdir)
    start = run.find_start()
    if start.step < run.settings.steps and not start.stopped:
        return start
    if first:
        finish_folder(run.workdir)
        with Copying(run.bucket, jax.process_index()):
            pass  # the report
    if run.copies is not None:
        run.copies.delete()
    if not start.held:
        run.state = None  # the folder's is newer
    why = f", stopped: {start.stopped}" if start.stopped else ""
    steps = f"step {start.step} of {run.settings.steps}"
    show(f"nothing to do: {run.shown} is at {steps}{why}")
    return None


def _start_up_note(run: PreparedRun, recipe: RecipeFunctions) -> str:
    """Describes a step, what was chosen, and what data cannot do."""
    job = run.job
    first = recipe.batches.first.rows
    note = describe(job.fsdp, run.abstract_state, first, job.train_step, run.hosts)
    if run.peers.count > 1:
        batch = abstract_batch(first, job.fsdp.mesh, job.fsdp.sequences)
        step = job.train_step.lower(run.abstract_state, batch)  # which is kept
        agree_on_program(run.peers, step.as_text())
    more = {"memory": run.chosen, "data": recipe.note}
    if run.copies is not None:
        more["local copies"] = run.copies.describe(run.settings.checkpoint.local)
    if run.peers.count > 1 and jax.default_backend() == "cpu":
        # Only process 0 writes, and on CPUs the others look for other keys.
        more["cache"] = "on CPUs JAX caches programs for process 0 only"
    return "\n".join([note, *(f"{k:<16}{text}" for k, text in more.items() if text)])


def _open_folder(run: PreparedRun, start: Start) -> RunFolder:
    configured = run.job.configured
    recipe = configured.recipe
    return RunFolder(
        run.workdir,
        configured.recorded,
        logger=run.settings.logger,
        tracker=recipe.tracker and partial(recipe.tracker, configured.config),
        recipe=recipe.name,
        fitted_on=run.fitted_on,
        resume_from=start.step if start.resumes else None,
        restored=start.restored,
        enabled=jax.process_index() == 0,
    )

"""One training run: from a recipe to metrics, checkpoints, a sample and a report."""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from jshard.cli.terminal import show
from jshard.config.profiled_steps import profiled_steps
from jshard.config.run_config import Config
from jshard.distributed import Peers
from jshard.errors import Interrupted, Preempted
from jshard.formatting import format_duration, one_line
from jshard.plan.start_up import describe
from jshard.recipe import contract
from jshard.recipe.definition import Recipe
from jshard.run.lock import check_unlocked
from jshard.run.metrics import RunFolder, finish_folder
from jshard.run.progress import ProgressDisplay
from jshard.run.saving import Saving
from jshard.run.start import STOPPED
from jshard.training.hooks import Hooks
from jshard.training.preemption import Preemption
from jshard.training.profiling import Profile
from jshard.training.run_inputs import Inputs
from jshard.training.run_setup import Setup, set_up
from jshard.training.step_log import StepLog
from jshard.training.throughput import Throughput


def run(
    recipe: Recipe,
    config: Config,
    workdir: Path,
    started: float | None = None,
    peers: Peers | None = None,
) -> None:
    """Sets up a recipe and trains it, as `train` does, from the start to the end."""
    peers = peers or Peers()
    with displayed(config, peers) as display:
        train(set_up(recipe, config, workdir, peers), display, started=started)


@contextmanager
def displayed(config: Config, peers: Peers) -> Iterator[ProgressDisplay]:
    """Shows a run's progress within it, and what its first process waits for."""
    with ProgressDisplay(config.steps, enabled=peers.index == 0) as display:
        peers.shown = display.at
        try:
            yield display
        finally:
            peers.shown = None


def train(
    setup: Setup,
    display: ProgressDisplay,
    hooks: Hooks | None = None,
    *,
    started: float | None = None,
    keeps_state: bool = False,
) -> None:
    """Trains a recipe's model; leaves metrics, checkpoints and a report in its folder.

    If the folder already holds this run, the run resumes from its newest checkpoint, or
    from the state at hand if that is as new. `setup.state` is the state of the last
    step, however the run ends.

    Args:
      setup: What to train, and where.
      display: Shows how far it is.
      hooks: The user's functions to call.
      started: When the process started, as `time.time()`; now by default.
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
    started, hooks = started or time.time(), hooks or Hooks()
    job, config, workdir, peers = setup.job, setup.config, setup.workdir, setup.peers
    writes = jax.process_index() == 0
    if writes:
        check_unlocked(workdir)
    start = setup.find_start()
    if start.step >= config.steps or start.stopped:
        if writes:
            finish_folder(workdir)
        if not start.held:
            setup.state = None  # the folder's is newer
        why = f", stopped: {start.stopped}" if start.stopped else ""
        show(f"nothing to do: {workdir} is at step {start.step} of {config.steps}{why}")
        return

    # Everything that can be wrong is found before the folder is written to.
    inputs = Inputs(setup, start)
    start_up = describe(
        job.fsdp, setup.abstract_state, inputs.first_batch, job.train_step, setup.hosts
    )
    if setup.experts:
        start_up += f"\n{'chosen':<16}{setup.experts}"
    if setup.chosen:
        start_up += f"\n{'memory':<16}{setup.chosen}"
    if inputs.note:
        start_up += f"\n{'data':<16}{inputs.note}"
    recipe = job.recipe
    references = contract.references(recipe.references if writes else None, config)
    display.references = references
    source = setup.restore(start)
    saves = bool(config.checkpoint.every)
    preemption = Preemption(saves=saves, exits=not keeps_state)
    traced = profiled_steps(config.profile.steps)
    # A run that saves nothing ends at once, unless it has a trace to write.
    listens = saves or keeps_state or bool(traced) or jax.process_count() > 1
    throughput = Throughput(inputs.first_batch, job.fsdp.mesh, inputs.flops)
    with (
        ExitStack() as signals,  # the outermost: the report must be completed, too
        RunFolder(
            workdir,
            config,
            recipe=recipe.name,
            fitted_on=setup.fitted_on,
            resume_from=start.step if start.resumes else None,
            lines=start.metrics,
            enabled=writes,
        ) as folder,
        Saving(
            config,
            folder,
            display,
            frozen_from=source.path,
            saved=lambda step, values: call("on_checkpoint", step, values),
        ) as saving,
        Profile(traced, start.step, workdir, peers, display.say) as profile,
        StepLog(
            inputs,
            throughput,
            folder,
            display,
            steps=range(start.step + 1, config.steps + 1),
            log_every=config.log_every,
            started=started,
        ) as steps,
        peers.telling(),
    ):
        if listens:
            signals.enter_context(preemption)
        lines = (start.message, start_up, profile.note)
        display.say("\n".join(filter(None, lines)))
        folder.note(recipe=recipe.path, start_up=start_up, references=references)
        if setup.state is None:
            peers.at("making initial values", start.step)
            setup.state = source.start(job)
            display.say(source.message())

        def call(kind: str, step: int, values: Mapping[str, Any]) -> None:
            """Calls the hooks of a kind, and logs what they return."""
            folder.log(step, hooks.call(kind, step, values))

        def sample(step: int, loss: float | None = None) -> str:
            assert inputs.sample is not None
            peers.at("sampling", step)
            text = inputs.sample(setup.state)
            folder.sample(step, text, loss)
            return text

        def evaluate(step: int) -> dict[str, float]:
            assert inputs.evaluation is not None
            peers.at("evaluating", step)
            values = inputs.evaluation(setup.state)
            folder.write(step, values)
            display.evaluated(step, values)
            if inputs.sample is not None:
                texts[step] = sample(step, values["eval_loss"])
            call("on_evaluation", step, values)
            folder.report()
            return values

        texts: dict[int, str] = {}  # samples by step
        step, first_step, ends = start.step, start.step + 1, False
        if start.unevaluated:
            evaluate(step)
            ends = hooks.ends(step, "after evaluation")
        throughput.restart()
        for step, batch in enumerate(() if ends else inputs.batches, first_step):
            last = step == config.steps
            if last and not listens:
                signals.enter_context(preemption)  # finish the last step in any case
            profile.before(step, setup.state, throughput)
            peers.at("step" if step > first_step else "compiling", step)
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                sharded = job.fsdp.shard_batch(batch)
                setup.state, metrics = job.train_step(setup.state, sharded)
            peers.at("computing", step)
            steps.add(step, metrics)
            profile.after(step, setup.state, throughput)
            display.update(step, metrics)
            saving.report()
            steps.add_returned(step, hooks.call("on_step", step, metrics))

            preempted = preemption.requested(step) and not last
            if preempted and not saves:
                kept = "; the state is kept, and fit() goes on" if keeps_state else ""
                raise Interrupted(
                    f"{preemption.signal_name} at step {step}, and "
                    f"checkpoint.every=0 saves nothing{kept}"
                )
            evaluates = bool(config.eval_every) and (
                last or step % config.eval_every == 0
            )
            ends = hooks.ends(step, "after step", agree=steps.logs(step) or evaluates)
            save = preempted or ends or saving.due(step, evaluated=evaluates)
            if save or evaluates or step == first_step:
                values = dict(steps.finish())
                if evaluates and not preempted:  # otherwise the resumed run evaluates
                    values |= evaluate(step)
                    ends = hooks.ends(step, "after evaluation") or ends
                if (save or ends) and saves:
                    peers.at("saving", step)
                    saving.save(setup.state, values)
                if preempted:
                    peers.at("finishing", step)
                    saving.finish()
                    again = f"run the same command with --workdir={workdir} to resume"
                    raise Preempted(
                        f"{preemption.signal_name} at step {step}: saved; "
                        f"{'fit() goes on' if keeps_state else again}"
                    )
                if ends:
                    break
                throughput.restart()
            peers.at("data", step)

        if hooks.error is None:
            stop = {"step": step, "steps": config.steps, "why": hooks.stop}
            folder.note(**{STOPPED: hooks.stop and stop})
            if hooks.stop:
                display.say(f"stopped at step {step}: {hooks.stop}")
            if inputs.sample is not None:
                text = texts[step] if step in texts else sample(step)
                display.say(f"\nsample:\n{text}\n")
            if inputs.pictures is not None:
                peers.at("predicting", step)
                folder.note(pictures=inputs.pictures(setup.state))
        peers.at("finishing", step)
        saving.finish()
        if hooks.error is not None:
            raise hooks.error
    took = format_duration(time.time() - started)
    display.say(one_line(f"done in {took}, report: {workdir / 'report.html'}"))

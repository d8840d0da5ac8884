"""One training run: from a recipe to metrics, checkpoints, a sample and a report."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jshard.distributed import Peers
from jshard.errors import Interrupted, Preempted
from jshard.state import TrainState
from jshard.training import returns
from jshard.training.agreement import agree, check_shared, facts_of
from jshard.training.config.config import Config
from jshard.training.config.profiled_steps import profiled_steps
from jshard.training.data.batches import batches
from jshard.training.data.dataset import make_training_data, make_validation_data
from jshard.training.evaluation import prepare_evaluation, prepare_sample
from jshard.training.finite import beyond_vocabulary, check_finite
from jshard.training.fitted_job import fitted_on, make_fitted_job
from jshard.training.job import Job, make_mesh
from jshard.training.pictures import prepare_pictures
from jshard.training.preemption import Preemption
from jshard.training.profile import Profile
from jshard.training.progress import ProgressDisplay, format_duration
from jshard.training.recipe import Recipe
from jshard.training.run_folder.metrics import RunFolder, finish_folder
from jshard.training.run_folder.saving import Saving, check_room
from jshard.training.run_folder.source import find_source
from jshard.training.run_folder.start import Start, find_start
from jshard.training.throughput import Throughput


def run(
    recipe: Recipe,
    config: Config,
    workdir: Path,
    started: float | None = None,
    peers: Peers | None = None,
) -> None:
    """Trains a recipe's model; leaves metrics, checkpoints and a report in `workdir`.

    If the folder already holds this run, the run resumes from its newest checkpoint.

    Args:
      recipe: What to train.
      config: The recipe's config, with every shared key.
      workdir: The run's folder.
      started: When the process started, as `time.time()`; now by default.
      peers: The processes that train together; this one alone by default.

    Raises:
      UserError: The config, the recipe, its data or the run in the folder cannot be
        used.
      RunFailed: The loss is not finite, or the metrics or the last state cannot be
        written.
      Interrupted: A signal ended the run, and `checkpoint.every=0` saves nothing.
      Preempted: A signal ended the run, and its state is saved.
    """
    started = started or time.time()
    peers = peers or Peers()
    stuck = None if config.watch.stuck == "auto" else config.watch.stuck
    peers.limit(config.watch.silence, stuck)
    peers.open_log(workdir)
    peers.at("setting up", 0)
    hosts = peers.hosts if peers.count > 1 else None
    mesh = make_mesh(config, hosts=hosts)
    job, chosen = make_fitted_job(recipe, config, mesh, hosts, workdir, peers)
    config = job.config
    abstract_state = job.abstract_state()
    start = find_start(workdir, config, peers, abstract_state)
    writes = jax.process_index() == 0
    if start.step >= config.steps:
        if writes:
            finish_folder(workdir)
        print(f"nothing to do: {workdir} is at step {start.step} of {config.steps}")
        return

    # Everything that can be wrong is found before the folder is written to.
    inputs = _Inputs(job, abstract_state, start, workdir, peers)
    start_up = job.fsdp.describe(
        abstract_state, inputs.first_batch, job.train_step, hosts
    )
    if chosen:
        start_up += f"\n{'memory':<16}{chosen}"
    references = returns.references(recipe.references if writes else None, config)
    peers.at("restoring", start.step)
    source = find_source(job, abstract_state, start.checkpoint)
    state: Any = start.checkpoint and source.restore(abstract_state)
    saves = bool(config.checkpoint.every)
    preemption = Preemption(saves=saves)
    traced = profiled_steps(config.profile.steps)
    # A run that saves nothing ends at once, unless it has a trace to write.
    listens = saves or bool(traced) or jax.process_count() > 1
    with (
        ExitStack() as signals,  # the outermost: the report must be completed, too
        RunFolder(
            workdir,
            config,
            recipe=recipe.name,
            fitted_on=fitted_on(mesh) if chosen else "",
            resume_from=start.step if start.resumes else None,
            lines=start.metrics,
            enabled=writes,
        ) as folder,
        ProgressDisplay(config.steps, references, enabled=writes) as display,
        Saving(config, folder, display, frozen_from=source.path) as saving,
        Profile(traced, start.step, workdir, peers, display.say) as profile,
        peers.telling(),
    ):
        if listens:
            signals.enter_context(preemption)
        lines = (start.message, start_up, profile.note)
        display.say("\n".join(filter(None, lines)))
        folder.note(recipe=recipe.path, start_up=start_up, references=references)
        if state is None:
            peers.at("making initial values", start.step)
            state = source.start(job)
            display.say(source.message())
        throughput = Throughput(inputs.first_batch, job.fsdp.mesh, inputs.flops)

        def evaluate(step: int) -> dict[str, float]:
            assert inputs.evaluation is not None
            peers.at("evaluating", step)
            values = inputs.evaluation(state)
            folder.write(step, values)
            folder.report()
            display.evaluated(step, values)
            return values

        if start.unevaluated:
            evaluate(start.step)
        history = []  # losses and norms since the last log, still on the devices
        first_step = start.step + 1
        for step, batch in enumerate(inputs.batches, first_step):
            last = step == config.steps
            if last and not listens:
                signals.enter_context(preemption)  # finish the last step in any case
            profile.before(step, state, throughput)
            peers.at("step" if step > first_step else "compiling", step)
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                state, metrics = job.train_step(state, job.fsdp.shard_batch(batch))
            peers.at("computing", step)
            history.append((metrics["loss"], metrics["grad_norm"]))
            # Running two steps ahead keeps the devices busy. Running further ahead
            # would fill their memory with batches.
            jax.block_until_ready(history[-3:-2])
            profile.after(step, state, throughput)
            display.update(step)
            saving.report()

            preempted = preemption.requested(step) and not last
            if preempted and not saves:
                raise Interrupted(
                    f"{preemption.signal_name} at step {step}, and "
                    "checkpoint.every=0 saves nothing"
                )
            evaluates = bool(config.eval_every) and (
                last or step % config.eval_every == 0
            )
            save = preempted or saving.due(step, evaluated=evaluates)
            logs = last or step == first_step or step % config.log_every == 0
            if logs or save or evaluates:
                values = inputs.fetch(step, metrics, history)
                if step == first_step:  # mostly compilation: says nothing of the speed
                    values["time_to_first_step"] = time.time() - started
                else:
                    values |= throughput.measure(len(history))
                history.clear()
                folder.write(step, values)
                display.log(step, values)
                if evaluates and not preempted:  # otherwise the resumed run evaluates
                    values |= evaluate(step)
                if save:
                    peers.at("saving", step)
                    saving.save(state, values)
                if preempted:
                    peers.at("finishing", step)
                    saving.finish()
                    raise Preempted(
                        f"{preemption.signal_name} at step {step}: saved; run the same "
                        f"command with --workdir={workdir} to resume"
                    )
                throughput.restart()
            peers.at("data", step)

        if inputs.sample is not None:
            peers.at("sampling", config.steps)
            text = inputs.sample(state)
            folder.note(sample=text)
            display.say(f"\nsample:\n{text}\n")
        if inputs.pictures is not None:
            peers.at("predicting", config.steps)
            folder.note(pictures=inputs.pictures(state))
        peers.at("finishing", config.steps)
        saving.finish()
    took = format_duration(time.time() - started)
    display.say(f"done in {took}, report: {workdir / 'report.html'}")


class _Inputs:
    """A recipe's data and optional functions, checked and ready for the loop."""

    def __init__(
        self,
        job: Job,
        abstract_state: TrainState,
        start: Start,
        workdir: Path,
        peers: Peers,
    ):
        recipe, config = job.recipe, job.config
        # A process reads the rows of its devices' place in the mesh.
        processes = [device.process_index for device in job.fsdp.mesh.devices.flat]
        self._reader = {
            "batch_size": config.batch_size,
            "process_index": list(dict.fromkeys(processes)).index(jax.process_index()),
            "process_count": jax.process_count(),
        }
        self._train_data = make_training_data(recipe.make_data, config)
        eval_data = make_validation_data(recipe.make_data, config)
        if peers.count > 1:
            data = {"train": self._train_data, "validation": eval_data}
            agree(peers, facts_of(recipe, config, workdir, start, abstract_state, data))
            if config.checkpoint.every:
                check_shared(peers, workdir / "logs")
        following = batches(
            self._train_data,
            start_step=start.step,
            num_steps=config.steps,
            **self._reader,
        )
        peers.at("reading the first batch", start.step)
        self.first_batch = next(following)
        self.batches = itertools.chain([self.first_batch], following)
        self._learning_rate = returns.learning_rate(recipe.learning_rate, config)
        self.flops = returns.flops_per_token(recipe.flops_per_token, config)
        sample = returns.sample(recipe.sample, config)
        self.sample = sample and prepare_sample(*sample, job.fsdp, abstract_state)
        pictures = returns.sample_images(recipe.sample_images, config)
        self.pictures = pictures and prepare_pictures(
            *pictures, job.fsdp, abstract_state
        )
        peers.at("reading the first evaluation batch", start.step)
        self.evaluation = None
        if config.eval_every:
            self.evaluation = prepare_evaluation(
                recipe.loss_fn,
                job.fsdp,
                abstract_state,
                eval_data,
                config,
                self._reader,
            )
        if config.checkpoint.every:
            given = dataclasses.replace(abstract_state, frozen=nnx.State({}))
            check_room(workdir, given if config.checkpoint.restore else abstract_state)
        self._model = job.fsdp.model(abstract_state)

    def fetch(
        self,
        step: int,
        metrics: Mapping[str, jax.Array],
        history: Sequence[tuple[jax.Array, jax.Array]],
    ) -> dict[str, float]:
        """Returns the metrics of a step, after checking all losses since the last log.

        Raises:
          RunFailed: A loss is not finite.
        """
        fetched = {name: float(x) for name, x in jax.device_get(metrics).items()}
        check_finite(history, step, fetched, self._find_cause)
        values = {"loss": fetched.pop("loss"), **fetched}
        if self._learning_rate is not None:
            values["learning_rate"] = self._learning_rate(step - 1)
        return values

    def _find_cause(self, step: int) -> str:
        """Reads the batch of a step again, and looks for tokens out of range."""
        again = {"start_step": step - 1, "num_steps": step, "num_threads": 0}
        (batch,) = batches(self._train_data, **self._reader, **again)
        return beyond_vocabulary(batch, self._model)

"""One training run: from a recipe to metrics, a sample and a report."""

import itertools
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jshard.checkpoint.restore import find_parameters, read_parameters, restore_state
from jshard.distributed import Peers
from jshard.errors import Interrupted, Preempted
from jshard.training import returns
from jshard.training.agreement import agree, check_shared, facts_of
from jshard.training.config.config import Config
from jshard.training.data.batches import batches
from jshard.training.data.dataset import make_training_data, make_validation_data
from jshard.training.evaluation import prepare_evaluation, prepare_sample
from jshard.training.finite import beyond_vocabulary, check_finite
from jshard.training.job import make_job, make_mesh
from jshard.training.preemption import Preemption
from jshard.training.progress import ProgressDisplay, format_duration
from jshard.training.recipe import Recipe
from jshard.training.run_folder.metrics import RunFolder, finish_folder
from jshard.training.run_folder.saving import Saving, check_room
from jshard.training.run_folder.start import find_start
from jshard.training.throughput import Throughput


def run(
    recipe: Recipe,
    config: Config,
    workdir: Path,
    started: float | None = None,
    peers: Peers | None = None,
) -> None:
    """Trains a recipe's model; leaves metrics, checkpoints and a report in `workdir`.

    A folder that holds the run already is where it goes on.

    Args:
      recipe: What to train.
      config: The recipe's config, with every shared key.
      workdir: The run's folder.
      started: When the process started, as `time.time()`; by default, now.
      peers: The processes that train together; by default, this one is alone.

    Raises:
      UserError: The config, the recipe, its data or the folder's run asks for what
        cannot be.
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
    job = make_job(recipe, config, make_mesh(config, hosts=hosts))
    fsdp, train_step = job.fsdp, job.train_step
    abstract_state = job.abstract_state()
    start = find_start(workdir, config, peers, abstract_state)

    reader = {
        "batch_size": config.batch_size,
        # Its place in the mesh: rows of a batch lie where the mesh has them.
        "process_index": _processes(fsdp.mesh).index(jax.process_index()),
        "process_count": jax.process_count(),
    }
    train_data = make_training_data(recipe.make_data, config)
    eval_data = make_validation_data(recipe.make_data, config)
    data = {"train": train_data, "validation": eval_data}
    if peers.count > 1:
        agree(peers, facts_of(recipe, config, workdir, start, abstract_state, data))
        if config.checkpoint.every:
            check_shared(peers, workdir / "logs")
    train_batches = batches(
        train_data, start_step=start.step, num_steps=config.steps, **reader
    )
    peers.at("reading the first batch", start.step)
    first_batch = next(train_batches, None)
    if first_batch is None:
        if jax.process_index() == 0:
            finish_folder(workdir)
        print(f"nothing to do: {workdir} is at step {start.step} of {config.steps}")
        return
    schedule = returns.learning_rate(recipe.learning_rate, config)
    flops = returns.flops_per_token(recipe.flops_per_token, config)
    start_up = fsdp.describe(abstract_state, first_batch, train_step, hosts)
    sample = returns.sample(recipe.sample, config)
    if sample is not None:
        sample = prepare_sample(*sample, fsdp, abstract_state)
    peers.at("reading the first evaluation batch", start.step)
    evaluation = None
    if config.eval_every:
        evaluation = prepare_evaluation(
            recipe.loss_fn, fsdp, abstract_state, eval_data, config, reader
        )
    if config.checkpoint.every:
        check_room(workdir, abstract_state)
    writes = jax.process_index() == 0  # and shows references, which take time to make
    references = returns.references(recipe.references if writes else None, config)
    peers.at("restoring", start.step)
    # Before the folder is touched: the checkpoint may be another model's.
    state: Any = start.checkpoint and restore_state(start.checkpoint, abstract_state)
    source = None if state is not None else _find_source(config, abstract_state)

    saves = bool(config.checkpoint.every)
    preemption = Preemption(saves=saves)
    resume_from = start.step if start.resumes else None
    with (
        ExitStack() as listening,  # to the end: also the report is to be whole
        RunFolder(
            workdir,
            config,
            recipe=recipe.name,
            resume_from=resume_from,
            lines=start.metrics,
            enabled=writes,
        ) as folder,
        ProgressDisplay(config.steps, references, enabled=writes) as display,
        Saving(config, folder, display) as saving,
        peers.telling(),
    ):
        if saves or jax.process_count() > 1:
            listening.enter_context(preemption)
        display.say("\n".join(filter(None, (start.message, start_up))))
        folder.note(recipe=recipe.path, start_up=start_up, references=references)

        if state is None:
            peers.at("making initial values", start.step)
            state = fsdp.init(job.make_model, job.optimizer, seed=config.seed)
            if source is not None:
                with_optimizer = config.checkpoint.restore_optimizer
                state = read_parameters(source, state, optimizer=with_optimizer)
                display.say(f"starting from the parameters of {source}")
        throughput = Throughput(first_batch, fsdp.mesh, flops)

        def evaluate(step: int) -> dict[str, float]:
            assert evaluation is not None
            peers.at("evaluating", step)
            values = evaluation(state)
            folder.write(step, values)
            folder.report()
            display.evaluated(step, values)
            return values

        if start.unevaluated:
            evaluate(start.step)

        def why_not_finite(step: int) -> str:
            """Looks at a step's batch again, which follows from its number."""
            again = {"start_step": step - 1, "num_steps": step, "num_threads": 0}
            (batch,) = batches(train_data, **reader, **again)
            return beyond_vocabulary(batch, fsdp.model(abstract_state))

        history = []  # losses and norms since the last log, still on the devices
        first_step = start.step + 1
        for step, batch in enumerate(
            itertools.chain([first_batch], train_batches), first_step
        ):
            last = step == config.steps
            if last and not saves and jax.process_count() == 1:
                listening.enter_context(preemption)  # what is nearly done is finished
            peers.at("step" if step > first_step else "compiling", step)
            state, metrics = train_step(state, fsdp.shard_batch(batch))
            peers.at("computing", step)
            history.append((metrics["loss"], metrics["grad_norm"]))
            # Two steps ahead keep the devices busy; more would fill their memory with
            # batches.
            jax.block_until_ready(history[-3:-2])
            display.update(step)
            saving.report()

            preempted = preemption.requested(step) and not last
            if preempted and not saves:
                raise Interrupted(
                    f"{preemption.signal_name} at step {step}, and "
                    "checkpoint.every=0 saves nothing"
                )
            evaluating = evaluation is not None and (
                last or step % config.eval_every == 0
            )
            save = preempted or saving.due(step, evaluated=evaluating)
            if not (
                save
                or evaluating
                or last
                or step == first_step
                or step % config.log_every == 0
            ):
                peers.at("data", step)
                continue
            fetched = {name: float(x) for name, x in jax.device_get(metrics).items()}
            check_finite(history, step, fetched, why_not_finite)
            values = {"loss": fetched.pop("loss"), **fetched}
            if schedule is not None:
                values["learning_rate"] = schedule(step - 1)
            if step == first_step:  # mostly the compiler's time: no measure of speed
                values["time_to_first_step"] = time.time() - started
            else:
                values |= throughput.measure(len(history))
            history.clear()
            folder.write(step, values)
            display.log(step, values)

            # Who is preempted has no time: the resumed run evaluates.
            if evaluating and not preempted:
                values |= evaluate(step)
            if save:
                peers.at("saving", step)
                saving.save(state, values)
            if preempted:
                peers.at("finishing", step)
                saving.finish()
                raise Preempted(
                    f"{preemption.signal_name} at step {step}: saved; the same command "
                    f"with --workdir={workdir} goes on"
                )
            throughput.restart()
            peers.at("data", step)

        if sample is not None:
            peers.at("sampling", config.steps)
            text = sample(state)
            folder.note(sample=text)
            display.say(f"\nsample:\n{text}\n")
        peers.at("finishing", config.steps)
        saving.finish()
    took = format_duration(time.time() - started)
    display.say(f"done in {took}, report: {workdir / 'report.html'}")


def _processes(mesh: Mesh) -> list[int]:
    """The processes in the order of their rows of a batch."""
    return list(dict.fromkeys(d.process_index for d in mesh.devices.flat))


def _find_source(config: Config, abstract_state: Any) -> Path | None:
    """What to start from: another run's parameters, or safetensors files, checked."""
    options = config.checkpoint
    if not options.restore:
        return None
    path = Path(options.restore).expanduser()
    return find_parameters(path, abstract_state, optimizer=options.restore_optimizer)

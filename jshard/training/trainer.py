"""Trainer: what `python -m jshard.train` does, in Python."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jshard.data.dataset import as_dataset, as_sets
from jshard.recipe.build import write_mesh
from jshard.recipe.config.policy_keys import write_policy
from jshard.recipe.configured import Configured, configure
from jshard.recipe.trainer_arguments import config_of, recipe_of_parts
from jshard.sharding.settings.callers_mesh import own_mesh
from jshard.sharding.settings.mesh import check_mesh
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP as _FSDP
from jshard.system.errors import UserError
from jshard.system.jobs.peers import Members, Peers
from jshard.training.callbacks.evaluation import prepare_evaluation
from jshard.training.callbacks.hooks import Hook, Hooks
from jshard.training.loop import displayed, train
from jshard.training.prediction import checked, predict_inputs, predictions
from jshard.training.prepared_run import PreparedRun, prepare_run
from jshard.training.report.run_files import read_metrics
from jshard.training.report.shown_report import ShownReport
from jshard.training.run.account import Account
from jshard.training.run.bucket import RunInBucket, open_workdir


class Trainer:
    """Trains, evaluates and predicts with a recipe, or with its parts.

        trainer = jshard.Trainer("gpt.py", config={"steps": 100}, workdir="runs/mine")
        trainer.fit()

    If the folder already holds the run, it continues from its newest checkpoint, as on
    the command line. Ctrl-C (or "interrupt" in a notebook) lets the step end, saves and
    raises `Preempted`; the state is kept, and `fit()` resumes. JAX's devices are taken
    as they are: for several on a CPU, `jax.config.update("jax_num_cpu_devices", 8)`
    before the first use of JAX.

    Args:
      recipe: A file, or the name of a packaged recipe, as for `--config`; a module; or
        None, with the parts by keyword.
      config: Values of keys to set over the recipe's, `{"steps": 100}`;
        without a recipe, those that every recipe has. A `ConfigDict` is the whole
        config, with any keys of its own.
      workdir: The run's folder, or its URL in a bucket; by default
        runs/NAME-DATE-TIME.
      mesh: By default that of `config.mesh`.
      policy: By default that of `config.policy`.
      on_step: A hook, or several, called after each step with `(trainer, step,
        metrics)`. The metrics are arrays on the devices: reading one waits for the
        step. A hook returns None, or a dict of numbers, texts and pictures [height,
        width, 3] to log; raising `jshard.training.StopTraining` ends the run as done.
      on_evaluation: The same, after each evaluation, with its metrics as numbers.
      on_checkpoint: The same, once a checkpoint is complete, with the save's metrics.
        Processes may be at different steps then.
      peers: The processes that train together; by default those of
        `jax.distributed.initialize`, if it was called.
      **parts: The functions of a recipe, in the place of its own: `make_model`,
        `make_optimizer`, `loss_fn`, `make_data`, `learning_rate`, `predict_fn` and so
        on (`jshard.recipe.load`); or `train_data`, `validation_data` and
        `test_data`, as `make_data` may return them.

    Attributes:
      config: The run's config, with every shared key; not to be changed.
      workdir: The run's folder; for a URL, the local copy of it.

    Raises:
      UserError: An argument is unknown, missing or impossible.
    """

    def __init__(
        self,
        recipe: Any = None,
        *,
        config: Any = None,
        workdir: str | Path | RunInBucket | None = None,
        mesh: Mesh | None = None,
        policy: Policy | None = None,
        on_step: Hook | list[Hook] | tuple[Hook, ...] = (),
        on_evaluation: Hook | list[Hook] | tuple[Hook, ...] = (),
        on_checkpoint: Hook | list[Hook] | tuple[Hook, ...] = (),
        peers: Peers | None = None,
        **parts: Any,
    ):
        joined = peers is None and jax.distributed.is_initialized()
        self._peers = peers or (Members() if joined else Peers())
        self._hooks: dict[str, Any] = {
            "on_step": on_step,
            "on_evaluation": on_evaluation,
            "on_checkpoint": on_checkpoint,
        }
        Hooks(**self._hooks)  # checks them
        self._recipe, self._imports = recipe_of_parts(recipe, parts)
        self._is_within = False
        with self._within():
            path, self._bucket = open_workdir(workdir or None)
            self.config: ConfigDict = config_of(self._recipe, config, path)
        if mesh is not None:
            write_mesh(self.config, check_mesh(mesh))
        if policy is not None:
            write_policy(self.config, policy)
        self._mesh, self._policy = mesh, policy
        name = re.sub(r"[^\w.-]", "-", self._recipe.name)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        stamp = self._peers.publish("stamp", stamp)
        self.workdir = path or Path(f"runs/{name}-{stamp}")
        self._run: PreparedRun | None = None
        self._steps: dict[Any, Callable[..., Any]] = {}  # compiled once

    def fit(self) -> "Trainer":
        """Trains to `config.steps`, from the newest checkpoint or the state at hand.

        Several processes watch over each other meanwhile, as under `jshard.launch`. If
        one alone fails, is killed or stopped, or cannot be reached for `watch.silence`
        seconds, all end with exit code 1 (2 for a UserError), and a line names it; if
        it is process 0, JAX aborts them. What all of them raise, each raises.

        Raises:
          UserError: The config, the recipe, its data or the run in the folder cannot be
            used.
          RunFailed: The loss is not finite, or the last state cannot be written.
          Preempted: A signal, such as Ctrl-C, ended the run after a step; its state is
            saved and kept.
          Interrupted: The same with `checkpoint.every=0`: it is kept alone.
          Exception: Whatever a hook raised, after a save.
        """
        fit_since(self, keeps_state=True)
        return self

    @property
    def state(self) -> TrainState:
        """The newest state: of the last step, of a checkpoint, or of initial values."""
        with self._within():
            return self._with_state().state

    @property
    def model(self) -> nnx.Module:
        """A module over the state's sharded arrays, in the modes it was made in."""
        return self.fsdp.model(self.state)

    @property
    def fsdp(self) -> _FSDP:
        """The mesh and the policy, and how to put batches there and fetch values."""
        with self._within():
            return self._ready().job.fsdp

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's `metrics.jsonl` so far, oldest first.

        Each is a dict with `step`, `time` (seconds since 1970) and numbers by name; a
        number that was not finite is None. Steps have `loss`, `grad_norm`, `step_time`
        and so on, evaluations `eval_loss` and so on, and saves `checkpoint_bytes` and
        so on, each in lines of their own:

            losses = {x["step"]: x["loss"] for x in trainer.metrics if "loss" in x}
        """
        return list(read_metrics(self.workdir))

    def report(self) -> ShownReport:
        """Returns the run's report, which a notebook shows; `path` is its HTML file.

        Raises:
          UserError: The run has none yet.
        """
        return ShownReport(self.workdir)

    def evaluate(
        self, data: Any = None, *, step: str | int | None = None
    ) -> dict[str, float]:
        """Returns the means of the loss and its metrics over all examples.

        Args:
          data: What `make_data` may return; by default the validation data.
          step: Takes the state of this checkpoint first: "best", "newest" or a number.
            By default the state stays; `fit` goes on from the newest in any case.

        Returns:
          `eval_loss` and so on; and `eval_ema_loss` if the state has averages. Of
          several sets by name, `eval_NAME_loss` too, and `eval_loss` over all of them.

        Raises:
          UserError: There are no data, they cannot be evaluated on, or there is no such
            checkpoint.
        """
        return self._evaluate(data, "validation", step)

    def test(
        self, data: Any = None, *, step: str | int | None = None
    ) -> dict[str, float]:
        """Returns `test_loss` and so on: like `evaluate`, on the test data."""
        values = self._evaluate(data, "test", step)
        return {f"test{name.removeprefix('eval')}": x for name, x in values.items()}

    def predict(
        self,
        data: Any,
        fn: Callable[[Any, Any], Any] | None = None,
        *,
        step: str | int | None = None,
    ) -> Any:
        """Returns a row for each example, in order, as NumPy arrays.

        Of several processes each returns the rows of its part: put one after the other,
        they are all. `predict_batches` yields what is too large for the host.

        Args:
          data: What `make_data` may return; "validation" and "test" name the
            recipe's own.
          fn: `fn(model, batch)` returns arrays with a row for each of a device's
            examples; by default the recipe's `predict_fn`, or the model called with
            `batch["inputs"]`.
          step: As for `evaluate`.

        Raises:
          UserError: The data are empty or unsuitable, or `fn` does not return rows.
        """
        batches = list(self.predict_batches(data, fn, step=step))
        return jax.tree.map(lambda *rows: np.concatenate(rows), *batches)

    def predict_batches(
        self,
        data: Any,
        fn: Callable[[Any, Any], Any] | None = None,
        *,
        step: str | int | None = None,
    ) -> Iterator[Any]:
        """Yields the rows of `predict`, one batch after the other."""
        with self._within():
            run = self._with_state(step)
            if isinstance(data, str):
                data = self._recipe.make_data(self.config, data)
            dataset = as_dataset(data, run.settings.seed, repeat=False)
            if dataset is None:
                raise UserError("predict: there are no data")
            fn = fn or self._recipe.predict_fn or predict_inputs
            if fn not in self._steps:
                self._steps[fn] = run.job.fsdp.predict_step(checked(fn))
            rows = predictions(run, run.state, self._steps[fn], dataset)
        # Only within it while this generator runs, not while its user does.
        while True:
            with self._within():
                batch = next(rows, None)
            if batch is None:
                return
            yield batch

    def _evaluate(
        self, data: Any, split: str, step: str | int | None
    ) -> dict[str, float]:
        with self._within():
            run = self._with_state(step)
            if data is None:
                data = self._recipe.make_data(self.config, split)
            if data is None:
                raise UserError(f"there are no {split} data: give {split}_data")
            sets = as_sets(data, run.settings.seed, run.job.configured.training_data)
            return prepare_evaluation(run, sets, self._steps)(run.state)

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Within it the recipe's imports are its own; a hook is within it already."""
        if self._is_within:
            yield
            return
        with self._imports(), own_mesh():
            self._is_within = True
            try:
                yield
            finally:
                self._is_within = False

    def _ready(self, configured: Configured | None = None) -> PreparedRun:
        configured = configured or configure(self._recipe, self.config)
        if self._run is None:
            self._run = prepare_run(
                configured,
                self.workdir,
                self._peers,
                self._mesh,
                self._policy,
                self._bucket,
            )
            self.config = self._run.job.configured.config  # what was open is chosen
        else:  # a key may be set since
            self._run.job = dataclasses.replace(self._run.job, configured=configured)
        return self._run

    def _with_state(self, step: str | int | None = None) -> PreparedRun:
        run = self._ready()
        if step is not None:
            run.take(step)
        elif not run.alive():
            source = run.restore(run.find_start())
            if run.state is None:
                run.state = source.start(run.job, run.abstract_state)
        return run

    def __repr__(self) -> str:
        return f"Trainer({self._recipe.name!r}, workdir={str(self.workdir)!r})"


def fit_since(
    trainer: Trainer,
    started: float | None = None,
    waited: Mapping[str, float] | None = None,
    *,
    keeps_state: bool,
) -> None:
    """Trains as `Trainer.fit` does.

    Args:
      trainer: Whose run it is.
      started: When the process started, for the time to the first step; by default
        now.
      waited: The seconds since then, by what they went to.
      keeps_state: Whether the state is still wanted if a signal ends the run.
    """
    started = started or time.time()
    account = Account(started, enabled=trainer._peers.index == 0)
    with trainer._within(), trainer._peers.watching(), account:
        hooks = Hooks(trainer, trainer._peers, **trainer._hooks)
        configured = configure(trainer._recipe, trainer.config)
        steps = configured.settings.steps
        with displayed(steps, trainer._peers, waited or {}, account) as display:
            train(
                trainer._ready(configured),
                display,
                hooks,
                account,
                started=started,
                keeps_state=keeps_state,
            )

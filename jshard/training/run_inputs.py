"""What a run reads while it trains, checked before anything is written."""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
from flax import nnx

from jshard.data.batches import batches
from jshard.data.dataset import make_training_data, make_validation_data
from jshard.data.iterables import Stream
from jshard.recipe import contract
from jshard.report.sample_pictures import prepare_pictures
from jshard.run.loggers.services import check_loggers
from jshard.run.saving import check_room
from jshard.run.start import Start
from jshard.training.agreement import agree, check_shared, facts_of
from jshard.training.evaluation import prepare_evaluation, prepare_sample
from jshard.training.non_finite import beyond_vocabulary, check_finite
from jshard.training.run_setup import Setup


class Inputs:
    """A recipe's data and optional functions, checked and ready for the loop.

    Attributes:
      first_batch: This process's part of the first batch.
      batches: Its parts of all batches, the first included.
      evaluation: From a state to the metrics of an evaluation; None without.
      sample: From a state to a text; None without.
      pictures: From a state to pictures for the report; None without.
      flops: Of a token, forward and backward, if known.
      note: What data lose that can only be read from their start; empty for none.
    """

    def __init__(self, setup: Setup, start: Start):
        job, peers, workdir = setup.job, setup.peers, setup.workdir
        abstract_state = setup.abstract_state
        recipe, config = job.recipe, job.config
        self._reader = setup.reader()
        self._train_data = make_training_data(recipe.make_data, config)
        eval_data = make_validation_data(recipe.make_data, config)
        data = {"train": self._train_data, "validation": eval_data}
        if peers.count > 1:
            agree(peers, facts_of(recipe, config, workdir, start, abstract_state, data))
            if config.checkpoint.every:
                check_shared(peers, workdir / "logs")
        self.note = "; ".join(
            x.note(split) for split, x in data.items() if isinstance(x, Stream)
        )
        following = batches(
            self._train_data,
            start_step=start.step,
            num_steps=config.steps,
            **self._reader,
        )
        peers.at("reading the first batch", start.step)
        self.first_batch = next(following)
        self.batches = itertools.chain([self.first_batch], following)
        self._learning_rate = contract.learning_rate(recipe.learning_rate, config)
        self.flops = contract.flops_per_token(recipe.flops_per_token, config)
        sample = contract.sample(recipe.sample, config)
        self.sample = sample and prepare_sample(*sample, job.fsdp, abstract_state)
        pictures = contract.sample_images(recipe.sample_images, config)
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
        check_loggers(config)
        if config.checkpoint.every:
            given = dataclasses.replace(abstract_state, frozen=nnx.State({}))
            check_room(workdir, given if config.checkpoint.restore else abstract_state)
        self._model = job.fsdp.model(abstract_state)

    def values(self, step: int, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """Waits for a step, and returns its metrics and its learning rate."""
        fetched = {name: float(x) for name, x in metrics.items()}
        values = {"loss": fetched.pop("loss"), **fetched}
        if self._learning_rate is not None:
            values["learning_rate"] = self._learning_rate(step - 1)
        return values

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Checks the metrics of a step.

        Raises:
          RunFailed: The loss is not finite.
        """
        check_finite(step, values, self._find_cause)

    def _find_cause(self, step: int) -> str:
        """Reads the batch of a step again, and looks for tokens out of range."""
        if isinstance(self._train_data, Stream):
            return ""  # it has gone by
        again = {"start_step": step - 1, "num_steps": step, "num_threads": 0}
        (batch,) = batches(self._train_data, **self._reader, **again)
        return beyond_vocabulary(batch, self._model)

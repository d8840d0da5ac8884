"""Tasks in a run, at its evaluations."""

from collections.abc import Iterator
from typing import Any

from jshard.data.tokenizers.tokenizer import load_tokenizer
from jshard.inference.evaluate.tasks import ROWS, load_tasks
from jshard.inference.generation.prompts import check_decoder
from jshard.inference.generation.weight_placement import sharded
from jshard.recipe.config.settings import RunSettings
from jshard.recipe.config.text_keys import TextKeys
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.system.errors import UserError


class RunTasks:
    """The tasks of `eval_tasks`, read before the first step.

    Programs are compiled at the first evaluation, for all of them.

    Attributes:
      names: Of the scores: a task's, its metric's, and its filter's if it has several.

    Raises:
      UserError: lm_eval or a task is missing, or the model or its data have no text.
    """

    def __init__(
        self,
        settings: RunSettings,
        keys: TextKeys,
        fsdp: FSDP,
        abstract_state: TrainState,
    ):
        option = "--config.eval_tasks"
        if keys.tokenizer is None:
            raise UserError(
                f"{option}: the recipe has no data.tokenizer, with which the model "
                "reads text"
            )
        self._placement = sharded(fsdp, abstract_state)
        check_decoder(self._placement.model, option)
        self._tokenizer = load_tokenizer(keys.tokenizer, keys.vocab_size)
        tasks = load_tasks(option, settings.eval_tasks, shows=False)

        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

        self._loaded = TaskManager(include_defaults=False).load(tasks)
        for task in self._loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(1234)  # lm_eval's own
        self._limit = settings.eval_limit or None
        self.names = list(self._names())

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Returns the scores of a state; every process gets all of them."""
        from lm_eval import evaluate  # pyright: ignore[reportMissingImports]

        from jshard.inference.evaluate.language_model import LanguageModel

        placement = self._placement.with_weights(state)
        model = LanguageModel(placement, self._tokenizer, ROWS)
        found = evaluate(
            model, self._loaded, limit=self._limit, bootstrap_iters=0, log_samples=False
        )
        return {
            _name(name, *key.split(",")): float(score)
            for name, scores in (found["results"] | found.get("groups", {})).items()
            for key, score in scores.items()
            if "," in key and "_stderr," not in key and isinstance(score, int | float)
        }

    def _names(self) -> Iterator[str]:
        for name, task in self._loaded["tasks"].items():
            for each in task.config.filter_list or [{"name": "none"}]:
                for metric in task.aggregation():
                    yield _name(name, metric, each["name"])
        for name, group in self._loaded["groups"].items():
            for each in group.aggregate_metric_list or []:
                for filter in each.filter_list:
                    yield _name(name, each.metric, filter)


def _name(task: str, metric: str, filter: Any) -> str:
    return f"{task}_{metric}" + (f"_{filter}" if filter != "none" else "")

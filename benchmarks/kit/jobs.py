"""What is trained: the models of the stages, for a card, or tiny ones for a CPU."""

from dataclasses import dataclass, field
from typing import Any

from ml_collections import ConfigDict

from jshard.recipe.config.run_config import complete
from jshard.recipe.definition import Recipe

_OFFLOADED = "offload:qkv+attended+hidden"


@dataclass(frozen=True)
class Job:
    """A training job that is measured and planned.

    Attributes:
      name: unique.
      recipe: a file of ``train/``.
      changes: of its config, by flat key.
    """

    name: str
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)

    def config(self, recipe: Recipe) -> ConfigDict:
        """The recipe's config with the changes."""
        config = complete(recipe.get_config(), self.recipe)
        with config.unlocked(), config.ignore_type():
            config.update_from_flattened_dict(self.changes)
        return config


def gpt2(card: str | None) -> Job:
    """GPT-2 124M, half a million tokens a step, as its recipe fits a GPU of 80 GB."""
    changes: dict[str, Any] = {"policy.remat": "none", "policy.accumulate": 4}
    if card is None:
        changes |= {"model.vocab_size": 256, **_tiny_model(), **_tiny_steps(8)}
        changes["policy.accumulate"] = 2
    return Job("gpt2", "gpt2_124m.py", changes)


def llamas(card: str | None) -> list[Job]:
    """1B whole, 7B and 8B as deep as fits, by remat and offload; the targets first.

    What is compared has one depth and one batch: those that fit with remat "none".
    """
    large = "141GB" if card in ("h200", "b200") else "80GB"
    return [
        llama(model, layers, batch, **policy)
        for model, layers, batch, policy in _SIZES["tiny" if card is None else large]
    ]


def llama(model: str, layers: int | None, batch: int, **policy: Any) -> Job:
    """A Llama without micro-batches.

    Args:
      model: "1b", "7b", "8b" or "tiny".
      layers: how many of them; None is all.
      batch: sequences a step.
      policy: of the recipe's config.
    """
    recipe = {"7b": "llama.py:2-7b", "1b": "llama.py:3-1b"}.get(model, "llama.py:3-8b")
    changes = {"model.sequence_length": 4096} if model == "1b" else {}
    if model == "tiny":
        changes = {**_tiny_model(), "model.hidden": 128, "model.num_kv_heads": 2}
        changes |= {"model.vocab_size": 256, **_tiny_steps(batch)}
    if layers:
        changes["model.num_layers"] = layers
    changes |= {"batch_size": batch, "policy.accumulate": 1}
    changes |= {f"policy.{name}": value for name, value in policy.items()}
    depth = f"-{layers}-layers" if layers else ""
    knobs = [str(value).split(":")[0] for value in policy.values()]
    if "offload" in policy:
        knobs[-1] = f"offload-{knobs[-1]}"
    return Job(f"llama-{model}{depth}-b{batch}-{'-'.join(knobs)}", recipe, changes)


def _tiny_model() -> dict[str, Any]:
    return {
        "model.sequence_length": 64,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.width": 64,
        "model.loss_chunk": 128,
    }


def _tiny_steps(batch: int) -> dict[str, Any]:
    return {"batch_size": batch, "eval_batches": 1, "checkpoint.every": 0}


# model, layers (None is all), sequences a step, policy; the planner says that they fit.
_SIZES: dict[str, list[tuple[str, int | None, int, dict[str, Any]]]] = {
    "tiny": [
        ("tiny", None, 4, {"remat": "full", "offload": "optimizer"}),
    ],
    "141GB": [
        ("1b", None, 8, {"remat": "dots"}),
        ("7b", None, 4, {"remat": "full"}),
        ("7b", None, 2, {"remat": "dots"}),
        *(("1b", None, 8, {"remat": remat}) for remat in ("full", "none")),
        *(("7b", 16, 4, {"remat": remat}) for remat in ("full", "dots", "none")),
        *(("8b", 12, 2, {"remat": remat}) for remat in ("full", "dots", "none")),
        *(("7b", 16, 4, {"remat": "full", "offload": x}) for x in ("optimizer", "all")),
        ("7b", 16, 4, {"remat": _OFFLOADED}),
        *(("8b", 12, 2, {"remat": "full", "offload": x}) for x in ("optimizer", "all")),
        ("8b", 12, 2, {"remat": _OFFLOADED}),
    ],
    "80GB": [
        ("1b", None, 4, {"remat": "dots"}),
        ("7b", 16, 4, {"remat": "full"}),
        *(("1b", None, 4, {"remat": remat}) for remat in ("full", "none")),
        *(("7b", 10, 2, {"remat": remat}) for remat in ("full", "dots", "none")),
        *(("8b", 8, 1, {"remat": remat}) for remat in ("full", "dots", "none")),
        *(("7b", 10, 2, {"remat": "full", "offload": x}) for x in ("optimizer", "all")),
        ("7b", 10, 2, {"remat": _OFFLOADED}),
        *(("8b", 8, 1, {"remat": "full", "offload": x}) for x in ("optimizer", "all")),
        ("8b", 8, 1, {"remat": _OFFLOADED}),
    ],
}

"""A recipe with its config: what commands and `Trainer` make, and all else takes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jshard.data.dataset import Dataset, Sets, as_dataset, as_sets
from jshard.recipe.config.overrides import with_values
from jshard.recipe.config.policy_keys import make_policy
from jshard.recipe.config.run_config import flatten
from jshard.recipe.config.settings import RunSettings, settings_of
from jshard.recipe.config.text_keys import TextKeys, text_keys
from jshard.recipe.definition import Recipe
from jshard.sharding.settings.policy import Policy
from jshard.system.errors import UserError


@dataclasses.dataclass(frozen=True)
class Configured:
    """A recipe with its config, and with what jshard itself reads of that.

    Attributes:
      recipe: The functions that say what to train.
      config: What these functions get; nothing else reads its keys.
      settings: The keys that every recipe shares.
    """

    recipe: Recipe
    config: ConfigDict
    settings: RunSettings

    @property
    def policy(self) -> Policy:
        """The policy that the config describes, without open keys.

        Raises:
          UserError: A value is not possible.
        """
        return make_policy(self.config)

    @property
    def text(self) -> TextKeys:
        """What the recipe's own keys say of its text."""
        return text_keys(self.config)

    @property
    def recorded(self) -> dict[str, Any]:
        """All keys, as a run's `config.json` has them."""
        return self.config.to_dict()

    @property
    def values(self) -> dict[str, Any]:
        """All values by dotted key."""
        return flatten(self.config)

    def with_values(self, values: Mapping[str, Any]) -> "Configured":
        """Returns the recipe with other values by dotted key, which are not checked."""
        return configure(self.recipe, with_values(self.config, values))

    def units(self) -> Any:
        """Returns the module types that become Units."""
        return self.recipe.units(self.config) if self.recipe.units else ()

    def tensor_splits(self) -> Any:
        """Returns what `mesh.tensor` splits of modules by path; None if not said."""
        function = self.recipe.tensor_splits
        return function(self.config) if function else None

    def sequences(self) -> Any:
        """Returns the arrays of a batch that are sequences; None if not said."""
        return self.recipe.sequences(self.config) if self.recipe.sequences else None

    def training_data(self) -> Dataset:
        """Returns the training data; a UserError if it is missing or no dataset."""
        data = self.recipe.make_data(self.config, "train")
        data = as_dataset(data, self.settings.seed, repeat=True)
        if data is None:
            raise UserError(
                "make_data returned None for split 'train': return a dataset"
            )
        return data

    def validation_data(self) -> Sets | None:
        """Returns the validation data, or None without data or evaluations."""
        if not self.settings.eval_every:
            return None
        data = self.recipe.make_data(self.config, "validation")
        return as_sets(data, self.settings.seed, self.training_data)


def configure(recipe: Recipe, config: ConfigDict) -> Configured:
    """Returns a recipe with a complete config, whose values are read now."""
    return Configured(recipe, config, settings_of(config))

"""The keys of spikes are what the recipes' optimizers skip by."""

import jax
import pytest
from flax import nnx

from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config
from jshard.sharding.update.skipping.skip_spikes import SkipSpikes


@pytest.mark.parametrize("name", ["gpt.py", "digits.py", "imagenet_regnet.py"])
def test_a_recipe_skips_by_its_keys_and_by_default_nothing(name):
    keys = {"optimizer.skip_spikes": 5.0, "optimizer.spike_window": 32}
    linear = nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with open_recipe(find_recipe(name)) as recipe:
        plain, skips = (
            recipe.make_optimizer(make_config(recipe, given)) for given in ({}, keys)
        )
        state = jax.eval_shape(skips.init, nnx.state(linear, nnx.Param))
    assert not isinstance(plain, SkipSpikes)
    assert isinstance(skips, SkipSpikes)
    assert (skips.k, state.losses.shape) == (5.0, (32,))

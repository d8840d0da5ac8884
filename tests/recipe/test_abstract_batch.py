"""A batch without values, which a plan and a program are made with before data."""

import jax
import numpy as np

import jshard
from jshard.data.dataset import first_example
from jshard.recipe.build import abstract_batch
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import open_recipe

RECIPE = """\
import numpy as np
import grain
from ml_collections import ConfigDict

EXAMPLE = {
    "index": np.arange(4),
    "image": np.zeros((2, 3), np.uint8),
    "weight": 0.5,
    "mask": np.ones(4, bool),
    "half": np.zeros(4, np.float16),
}

def get_config(): return ConfigDict({"steps": 1, "batch_size": 8})
def make_model(config, rngs): ...
def make_optimizer(config): ...
def loss_fn(model, batch): ...
def make_data(config, split): return grain.MapDataset.source([EXAMPLE] * 8)
"""


def test_it_has_the_types_and_shardings_that_values_have_on_devices(tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text(RECIPE)
    fsdp = jshard.FSDP(jshard.make_mesh())
    with open_recipe(file) as recipe:
        configured = configure(recipe, complete(recipe.get_config(), recipe.name))
        found, *_ = abstract_batch(configured, fsdp.mesh)
        example = first_example(configured.training_data())
    batch = jax.tree.map(lambda x: np.stack([np.asarray(x)] * 8), example)
    values = fsdp.shard_batch(batch)

    def seen(x):
        return x.shape, x.dtype, x.sharding

    assert jax.tree.map(seen, found) == jax.tree.map(seen, values)
    assert found["index"].dtype == np.int32
    assert found["weight"].dtype == np.float32

"""The memory that is estimated from a trace, beside XLA's for absent H100s."""

import pytest

from jshard.plan import has_plugin
from jshard.plan.fit.device_memory import compiled_bytes, step_bytes
from jshard.plan.program import trace
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe
from jshard.sharding.layout.capacity import state_bytes

pytestmark = pytest.mark.h100


@pytest.mark.parametrize(
    ("remat", "unroll", "accumulate"),
    [("none", True, 1), ("dots", True, 2), ("full", False, 1)],
)
def test_the_estimate_is_near_what_xla_assigns(remat, unroll, accumulate):
    if not has_plugin():
        pytest.skip("no CUDA plugin: pip install 'jshard[plan]'")
    settings = {
        "batch_size": 16,
        "model.num_layers": 4,
        "model.sequence_length": 4096,
        "policy.remat": remat,
        "policy.unroll": unroll,
        "policy.accumulate": accumulate,
    }
    with open_recipe(find_recipe("llama.py:3-1b")) as recipe:
        config = complete(recipe.get_config(), recipe.name)
        override(config, settings, recipe.name)
        program = trace(configure(recipe, config), "h100:8")
        estimate = state_bytes(program.state) + step_bytes(program.traced.jaxpr.jaxpr)
        needed = compiled_bytes(program.compile())
    # XLA adds the gradients of the table, as head and as embedding, in place.
    table = config.model.vocab_size * config.model.width * 4
    assert needed * 0.9 < estimate < needed * 1.1 + 2 * table

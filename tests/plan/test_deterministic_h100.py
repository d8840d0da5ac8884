"""`deterministic=true` in the program of absent H100s: scatters are sorted first."""

import pytest

from h100 import h100s
from jshard.plan import GPUS, compile_for, tracing_for
from jshard.recipe.build import abstract_batch, make_job
from jshard.recipe.config.overrides import override
from jshard.recipe.config.run_config import complete
from jshard.recipe.configured import configure
from jshard.recipe.load import find_recipe, open_recipe

pytestmark = pytest.mark.h100

SMALL = {
    "model.num_layers": 2,
    "model.width": 64,
    "model.num_heads": 2,
    "batch_size": 8,
}


def program(deterministic: bool) -> str:
    """A step of gpt.py for eight H100s."""
    mesh = h100s(8)
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = complete(recipe.get_config(), "gpt.py")
        override(config, SMALL | {"deterministic": deterministic}, "gpt.py")
        configured = configure(recipe, config)
        with tracing_for(GPUS["h100"]):
            job = make_job(configured, mesh.abstract_mesh)
            batch, _, _ = abstract_batch(configured, mesh.abstract_mesh)
            traced = job.train_step.trace(job.abstract_state(), batch)
        return str(compile_for(mesh, traced, job.fsdp.compiler_options).as_text())


def test_gradients_of_embeddings_are_added_up_in_the_order_of_their_tokens():
    """Otherwise they are added up by atomic operations, in any order."""
    plain = program(deterministic=False)
    assert " scatter(" in plain
    assert " sort(" not in plain
    scatters = [x for x in program(deterministic=True).splitlines() if " scatter(" in x]
    assert scatters
    assert all("indices_are_sorted=true" in x for x in scatters)

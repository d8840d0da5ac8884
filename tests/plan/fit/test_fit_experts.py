"""How many devices share the experts, where the config leaves it open."""

import jax
import pytest

import jshard
from jshard.plan.fit.expert_choice import with_experts
from jshard.plan.start_up import traffic
from jshard.recipe.build import abstract_batch, make_job, make_mesh
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

MOE = {
    "model.num_experts": 8,
    "model.num_layers": 1,
    "model.width": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.vocab_size": 1024,
    "mesh.expert": "fit",
    "batch_size": 8,
}


def choose(**changes):
    """(number of devices, reason, bytes by number) for a small Llama with experts."""
    received = {}
    with open_recipe(find_recipe("llama.py:3-1b")) as recipe:
        config = make_config(recipe, MOE | changes)

        def trace(config):
            mesh = make_mesh(config)
            job = make_job(recipe, config, mesh)
            batch, _, _ = abstract_batch(recipe, config, mesh)
            jaxpr = job.train_step.trace(job.abstract_state(), batch).jaxpr.jaxpr
            found = traffic(jaxpr, dict(mesh.shape)).values()
            received[config.mesh.expert] = sum(x.wire_bytes for x in found)
            return jaxpr, dict(mesh.shape)

        chosen, reason = with_experts(config, jax.devices(), trace)
    return chosen.mesh.expert, reason, received


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"model.hidden": 16, "model.sequence_length": 512},
        {"model.hidden": 2048, "model.sequence_length": 8},
    ],
    ids=["many tokens and small experts", "few tokens and large experts"],
)
def test_the_number_that_moves_the_fewest_bytes_is_chosen(sizes):
    number, reason, received = choose(**sizes)
    assert sorted(received) == [1, 2, 4, 8]
    assert number == min(received, key=lambda n: received[n])
    assert (number == 1) == (512 in sizes.values())
    assert reason.startswith(f"expert {number}, which moves the fewest bytes")


def test_a_model_without_experts_has_nothing_to_choose():
    with open_recipe(find_recipe("gpt.py")) as recipe:
        config = make_config(recipe, {"mesh.expert": "fit"})

    def trace(config):
        if config.mesh.expert > 1:
            raise jshard.UserError("GPT declares nothing")
        return jax.make_jaxpr(lambda x: x)(1.0).jaxpr, {}

    with pytest.raises(jshard.UserError, match="nothing to choose: GPT declares"):
        with_experts(config, jax.devices(), trace)
    with pytest.raises(jshard.UserError, match=r"mesh.expert=fit: only training"):
        make_mesh(config)

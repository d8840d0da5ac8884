"""What a pipeline does not do is one line, and a large bubble a warning."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jshard
from jshard.models.t5 import T5
from jshard.models.t5_config import T5Config
from jshard.sharding.layout.batch import abstract_batch
from jshard.system.errors import UserError
from pipelines import Layers, mean, mesh_of, policy_of


class WithAux(nnx.Linear):
    def __call__(self, x: jax.Array) -> Any:  # pyright: ignore
        return super().__call__(x), x


class Norm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


def trace(
    make_model: Any = Layers,
    loss_fn: Any = mean,
    mesh: dict[str, int] | None = None,
    **policy: Any,
) -> None:
    fsdp, tx = (
        jshard.FSDP(mesh_of(**mesh or {"pipe": 2}), policy_of(**policy)),
        optax.sgd(0.1),
    )
    state = fsdp.abstract_state(make_model, tx)
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    fsdp.train_step(loss_fn, tx).trace(state, abstract_batch(batch, fsdp.mesh))


def of_layers(layer: Any) -> Any:
    return lambda rngs: Layers(rngs, layer)


REFUSED = {
    "no Stack": ({"make_model": Norm}, "one jshard.Stack, and the model has none"),
    "two Stacks": (
        {"make_model": lambda rngs: Layers(rngs, stacks=2)},
        "the model has blocks0, blocks1",
    ),
    "T5": (
        {"make_model": lambda rngs: T5(T5Config(width=8, hidden=8), rngs=rngs)},
        "the model has decoder, encoder",
    ),
    "stages": ({"mesh": {"pipe": 8}, "accumulate": 16}, "exceed the 4 layers"),
    "no pipeline": (
        {"mesh": {"fsdp": 2}, "stages_per_device": 2},
        "the mesh has no pipeline",
    ),
    "interleaved stages": (
        {"mesh": {"pipe": 2}, "stages_per_device": 4},
        "8 stages exceed the 4 layers .* choose at most 4",
    ),
    "groups": (
        {"mesh": {"pipe": 2}, "stages_per_device": 2, "accumulate": 3},
        "accumulate=3 is not a multiple",
    ),
    "aux": (
        {"make_model": of_layers(lambda rngs: WithAux(8, 8, rngs=rngs))},
        "aux of all layers of 'blocks0' crosses stages .* 64 values beside the 16",
    ),
    "carry": (
        {"make_model": of_layers(lambda rngs: nnx.Linear(8, 4, rngs=rngs))},
        "a stacked layer turns",
    ),
    "state of layers": ({"make_model": of_layers(Norm)}, "changes its state"),
    "reshard": ({"reshard_after_forward": 2}, "once per step and keeps them"),
    "first_k": ({"first_k": 1}, "policy.first_k=1"),
    "root": ({"reshard_root": True}, "policy.reshard_root=True"),
    "gather": (
        {"precision": jshard.Precision(gather="int8")},
        "policy.precision.gather",
    ),
    "twice": (
        {"loss_fn": lambda model, batch: mean(model, model(batch))},
        "must call its Stack once",
    ),
    "in a transform": (
        {"loss_fn": lambda model, x: mean(model, jax.vmap(model)(x[:, None])[:, 0])},
        "a transform",
    ),
    "print": (
        {"loss_fn": lambda m, x: (jax.debug.print("{}", x.sum()), mean(m, x))[1]},
        "prints or calls back",
    ),
    "count": (
        {"loss_fn": lambda model, x: jshard.Mean(1.0, jnp.sum(model(x) > 0))},
        "a count or weight of the loss",
    ),
}


@pytest.mark.parametrize(("given", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_pipeline_does_not_do_is_one_line(given, words):
    with pytest.raises(UserError, match=words) as error:
        trace(**given)
    assert "\n" not in str(error.value)


def test_a_large_bubble_is_a_warning():
    with pytest.warns(
        match="accumulate=1 a device is idle for 50% .*; with 2, for 33%"
    ):
        trace(accumulate=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(accumulate=2)

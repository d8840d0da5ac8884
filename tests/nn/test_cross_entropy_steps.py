"""jshard.nn.cross_entropy in steps on meshes, and how many products they have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_cross_entropy import plain

import hlo
import jshard
import parity
from filled import filled
from jshard.nn import cross_entropy


class Model(nnx.Module):
    """Embeds and predicts: nothing but a head."""

    splits_sequences = True
    tensor_split = jshard.nn.Split(columns=("head",))

    def __init__(self, tied: bool, rngs: nnx.Rngs):
        kwargs = {"param_dtype": jnp.float64, "rngs": rngs}
        self.embed = jshard.Unit(nnx.Embed(48, 16, **kwargs))
        linear = None if tied else nnx.Linear(16, 48, use_bias=False, **kwargs)
        self.head = linear and jshard.Unit(linear)

    def loss(self, loss_fn: Callable, batch: dict[str, Any]) -> Any:
        embed = jshard.gathered(self.embed)
        if self.head is None:
            head_DV = embed.embedding.get_value().T
        else:
            head_DV = jshard.gathered(self.head).kernel.get_value()
        x_BTD = jnp.tanh(embed(batch["inputs"]))
        return loss_fn(x_BTD, head_DV, batch["targets"], batch["weights"])


@pytest.mark.slow  # test_cross_entropy_parts.py has a mesh
@pytest.mark.parametrize(
    ("tied", "frozen", "min_shard"),
    [(False, None, 0), (True, None, 0), (False, "head", 0), (False, "embed", 10**6)],
)
def test_a_step_on_a_mesh_follows_a_plain_run(x64, tied, frozen, min_shard):
    rng = np.random.default_rng(0)
    weights = (np.arange(5) < rng.integers(0, 6, (32, 1))) * 1.0  # uneven counts
    batch = {
        "inputs": rng.integers(0, 48, (32, 5)),
        "targets": rng.integers(0, 48, (32, 5)),
        "weights": weights,
    }
    policy = jshard.Policy(accumulate=2, min_shard_elements=min_shard)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    optimizer = optax.sgd(1.0)
    wrt = lambda path, value: isinstance(value, nnx.Param) and frozen not in path
    model = filled(lambda: Model(tied, nnx.Rngs(0)))
    state = fsdp.from_model(model, optimizer, wrt=wrt)
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def mean(params):
        model = nnx.merge(graphdef, params, rest)
        return model.loss(plain, batch) / np.sum(weights)

    loss, grads = jax.jit(jax.value_and_grad(mean))(params)
    want = jax.tree.map(lambda p, g: p - g, params, grads)

    step = fsdp.train_step(
        lambda model, batch: model.loss(
            functools.partial(cross_entropy, chunk=4), batch
        ),
        optimizer,
    )
    state, metrics = step(state, fsdp.shard_batch(batch))
    assert parity.error(metrics["loss"], loss) <= 1e-12
    got, want = map(parity.by_path, (fsdp.fetch(state.params), want))
    assert parity.worst(got, want) <= 1e-12
    assert len(want) == (1 if tied or frozen else 2)


# By default test_cross_entropy_parts.py has such a token, with a split head.
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}, {"tensor": 2, "context": 2}])
def test_on_a_mesh_a_token_of_weight_0_adds_nothing(x64, mesh):
    rng = np.random.default_rng(0)
    batch = {
        "inputs": rng.integers(0, 48, (16, 8)),
        "targets": rng.integers(0, 48, (16, 8)),
        "weights": (rng.random((16, 8)) < 0.6) * 1.0,
    }

    def updated(feature: float, **mesh: Any) -> Any:
        def loss(model: Model, batch: Any) -> jshard.Mean:
            ignored = (batch["weights"] == 0)[..., None]
            odd = lambda x, *rest: cross_entropy(
                jnp.where(ignored, feature, x), *rest, chunk=4, vocabulary=48
            )
            return model.loss(odd, batch)

        policy = jshard.Policy(accumulate=2, min_shard_elements=0)
        fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy, sequences=tuple(batch))
        tx = optax.sgd(1.0)
        state = fsdp.init(lambda rngs: Model(False, rngs), tx)
        state, metrics = fsdp.train_step(loss, tx)(state, fsdp.shard_batch(batch))
        return metrics["loss"], parity.by_path(fsdp.fetch(state.params))

    (loss, params), (want, want_params) = updated(np.inf, **mesh), updated(0.5)
    assert parity.error(loss, want) <= 1e-12
    assert parity.worst(params, want_params) <= 1e-12


def test_a_step_has_three_products_a_micro_batch_and_an_evaluation_one(x64):
    (B, T), policy = (32, 8), jshard.Policy(accumulate=2)
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh(replica=2), policy), optax.sgd(1.0)
    state = fsdp.abstract_state(lambda rngs: Model(False, rngs), optimizer)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    weights = jax.ShapeDtypeStruct((B, T), jnp.float32)
    batch = {"inputs": tokens, "targets": tokens, "weights": weights}

    def loss(model: Model, batch: dict[str, jax.Array]) -> jshard.Mean:
        return model.loss(functools.partial(cross_entropy, chunk=4), batch)

    product = 2 * (B * T // 8) * 16 * 48  # all tokens of a device
    for step, products in (
        (fsdp.train_step(loss, optimizer), 3),
        (fsdp.eval_step(loss), 1),
    ):
        text = hlo.compile(step.lower(state, batch)).as_text()
        assert sum(dot.flops for dot in hlo.dots(text)) == products * product

"""Optimizer state in bfloat16: under other transformations, in training and on disk."""

import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import checkpoints
import jshard
from decoder import (
    PlainDecoder,
    Sizes,
    loss_fn,
    lower_update,
    make_decoder,
    make_fsdp,
    values_like,
)
from filled import filled
from jshard.recipe.config.run_config import check as check_config
from jshard.recipe.config.run_config import complete
from jshard.recipe.load import find_recipe, open_recipe
from jshard.sharding.update.bf16_moments import Bf16MomentsState
from jshard.storage.checkpoint.restore import restore_state

# The module, not the function of its name.
bf16_moments = importlib.import_module("jshard.sharding.update.bf16_moments")
POLICY = jshard.Policy(min_shard_elements=0)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def moment(name: str) -> bool:
    return bool(re.search(r"\.(mu|nu|trace)\b", name))


def matrices(params: Any) -> Any:
    return nnx.map_state(lambda path, _: path[-1] == "kernel", params)


WRAPPED = {
    "alone": lambda: jshard.optim.bf16_moments(optax.adamw(1e-3)),
    "around a chain": lambda: jshard.optim.bf16_moments(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    ),
    "around per_layer": lambda: jshard.optim.bf16_moments(
        jshard.optim.per_layer(optax.lamb(1e-3))
    ),
    "in per_layer": lambda: jshard.optim.per_layer(
        jshard.optim.bf16_moments(optax.lamb(1e-3))
    ),
    "around matrices": lambda: jshard.optim.bf16_moments(jshard.optim.muon(1e-3)),
    "around a mask": lambda: jshard.optim.bf16_moments(
        optax.masked(optax.adamw(1e-3), matrices)
    ),
    "in a mask": lambda: optax.masked(
        jshard.optim.bf16_moments(optax.adamw(1e-3)), matrices
    ),
    "around hyperparameters": lambda: jshard.optim.bf16_moments(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)
    ),
    "in hyperparameters": lambda: optax.inject_hyperparams(
        lambda learning_rate: jshard.optim.bf16_moments(optax.adamw(learning_rate))
    )(learning_rate=1e-3),
}


@pytest.mark.quick("in a mask")
@pytest.mark.parametrize("name", WRAPPED)
def test_moments_and_they_alone_are_bfloat16_and_sharded_like_parameters(name):
    fsdp, tx = make_fsdp(POLICY), WRAPPED[name]()
    lowered, state = lower_update(fsdp, make_decoder(Sizes()), tx)
    params, found = leaves_by_name(state.params), 0
    for path, leaf in leaves_by_name(state.opt_state).items():
        assert (leaf.dtype == jnp.bfloat16) == moment(path), path
        if moment(path):
            name = max(filter(path.endswith, params), key=len)
            assert leaf.sharding == params[name].sharding, path
            found += 1
    assert found >= 4
    # An update returns what it was given: the step can donate it.
    _, after = lowered.out_info
    kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    assert kinds(after) == kinds(state.opt_state)


def test_moments_of_scalars_and_factored_statistics_stay_float32():
    params = {"scale": jnp.ones(()), "matrix": jnp.ones((256, 256))}
    adam: Any = jshard.optim.bf16_moments(optax.adam(1e-3)).init(params).inner[0]
    assert adam.mu["scale"].dtype == jnp.float32
    assert adam.mu["matrix"].dtype == jnp.bfloat16
    factored = jshard.optim.bf16_moments(optax.adafactor(1e-3)).init(params)
    dtypes = {x.dtype for x in jax.tree.leaves(factored) if x.size > 1}
    assert dtypes == {jnp.dtype("float32")}


def test_the_inner_update_sees_float32():
    seen = []

    def update(updates, state, params=None, *, value):
        seen.append((state.dtype, value))
        return updates, state * 0.5

    inner = optax.GradientTransformationExtraArgs(lambda params: params, update)
    tx = jshard.optim.bf16_moments(inner)
    params = jnp.ones((4, 4), jnp.bfloat16)
    first = lambda params: tx.update(params, tx.init(params), params, value=3)
    updates, state = jax.jit(first)(params)
    assert seen == [(jnp.float32, 3)]
    assert state.inner.dtype == updates.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(state.inner, np.float32), 0.5)
    assert isinstance(state, Bf16MomentsState)
    assert int(state.step) == 1


def test_the_state_takes_half_the_memory():
    def held(tx: Any) -> int:
        state = make_fsdp(POLICY).abstract_state(make_decoder(Sizes()), tx)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))

    adamw = optax.adamw(1e-3)
    counts = 4
    assert (
        held(jshard.optim.bf16_moments(adamw)) - 2 * counts
        == (held(adamw) - counts) / 2
    )


# Why: training.


def to_nearest(x: jax.Array, bits: jax.Array) -> jax.Array:
    del bits
    # A mere cast in a loop XLA drops, as excess precision.
    return lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)


def test_a_second_moment_decays_and_rounded_to_nearest_it_is_stuck(monkeypatch):
    adam = optax.scale_by_adam(b2=0.999)
    steps, params = 700, jnp.ones((16, 64))

    def second_moment(tx: Any) -> float:
        update = lambda state, _: (tx.update(0 * params, state)[1], None)

        @jax.jit
        def run(params: jax.Array) -> Any:
            _, state = tx.update(params, tx.init(params))
            return lax.scan(update, state, length=steps)[0]

        state = run(params)
        return float(jnp.mean(optax.tree.get(state, "nu")))

    want = 1e-3 * 0.999**steps
    assert second_moment(adam) == pytest.approx(want, rel=1e-3)
    assert second_moment(jshard.optim.bf16_moments(adam)) == pytest.approx(
        want, rel=0.02
    )
    monkeypatch.setattr(bf16_moments, "round_to_bf16", to_nearest)
    assert second_moment(jshard.optim.bf16_moments(adam)) == pytest.approx(
        1e-3, rel=0.01
    )


def train(tx: Any, steps: int = 1000) -> tuple[np.ndarray, nnx.State, nnx.State]:
    """Learns a permutation of tokens: losses, parameters, second moments."""
    sizes = Sizes(layers=1)
    graphdef, params = nnx.split(PlainDecoder(sizes, nnx.Rngs(0)), nnx.Param)
    permutation = jax.random.permutation(jax.random.key(1), sizes.vocab)

    def step(carry, key):
        params, state = carry
        tokens = jax.random.randint(key, (16, sizes.length), 0, sizes.vocab)
        batch = {"tokens": tokens, "targets": permutation[tokens]}
        loss = lambda p: loss_fn(nnx.merge(graphdef, p), batch).compute()
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(0), steps)
    run = jax.jit(lambda carry: lax.scan(step, carry, keys))
    (params, state), losses = run((params, tx.init(params)))
    return np.asarray(losses), params, optax.tree.get(state, "nu")


@pytest.mark.slow
def test_adamw_follows_float32_where_rounding_to_nearest_does_not(monkeypatch):
    tx = optax.adamw(3e-3, b2=0.999)
    losses, params, nu = train(tx)
    assert losses[-1] < losses[0] / 1000

    def apart(losses_: np.ndarray, params_: nnx.State, nu_: nnx.State) -> tuple:
        """The differences in early losses, late ones, parameters and moments."""
        difference = np.abs(losses_ - losses)
        moved = jax.tree.map(jnp.subtract, params_, params)
        total = lambda tree: float(optax.tree.sum(optax.tree.cast(tree, "float32")))
        return (
            np.max(difference[:100]),
            np.max(difference[500:]) / np.mean(losses[500:]),
            float(optax.tree.norm(moved) / optax.tree.norm(params)),
            total(nu_) / total(nu),
        )

    early, late, moved, moments = apart(*train(jshard.optim.bf16_moments(tx)))
    assert early < 2e-3
    assert late < 0.01
    assert moved < 0.01
    assert 0.97 < moments < 1.03
    monkeypatch.setattr(bf16_moments, "round_to_bf16", to_nearest)
    # Gradients are small by now; second moments are still those of large ones.
    _, late, moved, moments = apart(*train(jshard.optim.bf16_moments(tx)))
    assert late > 0.05
    assert moved > 0.01
    assert moments > 1.5


# In checkpoints and recipes.


@pytest.mark.slow  # test_restore_memory.py restores them
def test_a_checkpoint_restores_bfloat16_moments_on_another_mesh(tmp_path):
    tx = jshard.optim.bf16_moments(optax.adamw(1e-2))
    fsdp, other = checkpoints.make_fsdp(), checkpoints.make_fsdp(2, 4)
    model = filled(lambda: checkpoints.Model(nnx.Rngs(0)))
    state = fsdp.from_model(model, tx)
    moments = values_like(state.opt_state.inner[0].mu)
    state.opt_state.inner[0].mu.update(jax.tree.map(jnp.bfloat16, moments))
    checkpoints.save_steps(tmp_path, state, 1)
    abstract = other.abstract_state(checkpoints.Model, tx)
    restored = restore_state(tmp_path / "1", abstract)
    checkpoints.check_equal(restored, checkpoints.at_step(state, 1))
    assert {x.dtype for x in jax.tree.leaves(restored.opt_state.inner[0].nu)} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("recipe", ["gpt.py", "gpt2_124m.py"])
def test_recipes_take_a_moment_dtype(recipe):
    with open_recipe(find_recipe(recipe)) as loaded:
        config = complete(loaded.get_config(), recipe)
        params = nnx.State({"kernel": nnx.Param(jnp.ones((2, 2)))})
        for dtype in ("float32", "bfloat16"):
            config.optimizer.moment_dtype = dtype
            state = loaded.make_optimizer(config).init(params)
            nu = optax.tree.get(state, "nu")
            assert nu["kernel"].dtype == dtype
        config.optimizer.moment_dtype = "float16"
        with pytest.raises(jshard.UserError, match="must be float32 or bfloat16"):
            check_config(config)

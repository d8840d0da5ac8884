"""The keys of optimizer and loss that all packaged recipes of texts have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipe.make_config import make_config

RECIPES = (
    "gpt.py", "gpt2_124m.py", "llama.py:3-1b", "finetune.py", "preference.py",
    "bert.py", "t5.py",
)  # fmt: skip
KEYS = {
    "learning_rate": 0.1,
    "schedule": "wsd",
    "final_fraction": 0.5,
    "warmup_fraction": 0.25,
    "initial_fraction": 0.0,
    "decay_steps": 2,
    "cycles": 2,
    "b1": 0.8,
    "b2": 0.7,
    "eps": 0.5,
    "weight_decay": 0.3,
}
RATES = [0.0, 0.05, 0.1, 0.1, 0.1, 0.1, 0.1, 0.075]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_of_texts_has_the_keys_of_optimizer_and_loss(name):
    with open_recipe(find_recipe(name)) as recipe:
        given = {f"optimizer.{key}": value for key, value in KEYS.items()}
        config = make_config(recipe, {"steps": 8, **given})
        assert recipe.learning_rate is not None
        schedule = recipe.learning_rate(config)
        rates = [float(schedule(i)) for i in range(8)]
        np.testing.assert_allclose(rates, RATES, rtol=1e-6)
        assert config.optimizer.decay_norms is False
        smoothed = ("label_smoothing" in config.model, "z_loss" in config.model)
        assert smoothed == (name != "preference.py",) * 2  # it has losses of its own
        chats = name not in ("preference.py", "bert.py", "t5.py")
        assert ("train_on" in config.data) == chats


@pytest.mark.parametrize("decay_norms", [False, True])
def test_moments_epsilon_and_decay_are_those_of_the_keys(decay_norms):
    rng = np.random.default_rng(0)
    draw = lambda: {
        name: nnx.Param(jax.device_put(np.asarray(rng.normal(size=3), jnp.float32)))
        for name in ("kernel", "scale")
    }
    params = nnx.State(draw())
    with open_recipe(find_recipe("gpt.py")) as recipe:
        given = {f"optimizer.{key}": value for key, value in KEYS.items()}
        given |= {"optimizer.decay_norms": decay_norms, "optimizer.clip_norm": 1e9}
        config = make_config(recipe, {"steps": 8, **given})
        optimizer = recipe.make_optimizer(config)
    update = jax.jit(optimizer.update)
    state, moments = optimizer.init(params), {}
    got = {name: np.float64(x.get_value()) for name, x in params.items()}
    want = dict(got)
    for i, rate in enumerate(RATES, 1):
        gradients = nnx.State(draw())
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name, x in gradients.items():
            g = np.float64(x.get_value())
            m, v = moments.get(name, (0, 0))
            moments[name] = m, v = 0.8 * m + 0.2 * g, 0.7 * v + 0.3 * g * g
            step = m / (1 - 0.8**i) / (np.sqrt(v / (1 - 0.7**i)) + 0.5)
            decay = 0.3 * want[name] * (decay_norms or name == "kernel")
            want[name] = want[name] - rate * (step + decay)
    for name, x in params.items():
        np.testing.assert_allclose(x.get_value(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt.py", "llama.py:3-1b", "bert.py", "t5.py"])
def test_a_models_loss_has_the_smoothing_and_z_loss_of_the_keys(name, monkeypatch):
    given = {"model.label_smoothing": 0.2, "model.z_loss": 0.01, "model.num_layers": 1}
    calls = []
    monkeypatch.setattr(
        jshard.nn, "cross_entropy", lambda *args, **options: calls.append(options)
    )
    tokens = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    names = ("inputs", "targets", "weights", "places", "mask")
    with open_recipe(find_recipe(name)) as recipe:
        config = make_config(recipe, given)

        def loss(batch):
            recipe.loss_fn(recipe.make_model(config, nnx.Rngs(0)), batch)

        jax.eval_shape(loss, dict.fromkeys(names, tokens))
    (options,) = calls
    assert (options["label_smoothing"], options["z_loss"]) == (0.2, 0.01)

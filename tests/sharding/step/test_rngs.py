"""A loss's ``rngs``: what they draw for examples is the same on every mesh."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard.testing
from filled import filled

pytestmark = pytest.mark.usefixtures("x64")

EXAMPLES, LENGTH, WIDTH, STEPS, SEED, RATE = 16, 4, 6, 2, 5, 0.25
TX = optax.sgd(0.1)
X = np.random.default_rng(0).normal(size=(EXAMPLES, LENGTH, WIDTH))


class Block(nnx.Module):
    """A layer in Flax's newer style: its dropout is given ``rngs`` at the call."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(RATE)

    def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(x)), rngs=rngs)


class Model(nnx.Module):
    splits_sequences = True

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
        for block in self.blocks:
            x = block(x, rngs=rngs)
        return x


class Stacked(nnx.Module):
    """Draws before and after a Stack, whose layers a pipeline has in stages."""

    def __init__(self, rngs: nnx.Rngs):
        self.dropout = nnx.Dropout(RATE)
        linear = functools.partial(nnx.Linear, WIDTH, WIDTH, param_dtype=jnp.float64)
        self.layers = jshard.Stack(lambda r: linear(rngs=r), 2, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
        x = self.layers(self.dropout(x, rngs=rngs))
        return self.dropout(x, rngs=rngs)


def loss_fn(model: Any, x: jax.Array, rngs: Any) -> Any:
    """Noise of the examples, masks, and a number and a row that all share."""
    y = model(x + rngs.noise.normal(x.shape), rngs=rngs)
    y = y * rngs.uniform(()) + rngs.uniform((1, WIDTH))
    return jshard.Mean(jnp.sum(y**2), y.size)


class Draws:
    """What ``rngs`` draw in a step, by the words of its documentation."""

    def __init__(self, step: jax.Array):
        self.key, self.count = jax.random.fold_in(jax.random.key(SEED), step), 0

    def __call__(self, draw: Any, shape: tuple[int, ...]) -> jax.Array:
        key = jax.random.fold_in(self.key, self.count)
        self.count += 1
        if shape[:1] != (EXAMPLES,):
            return draw(key, shape)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(EXAMPLES))
        return jax.vmap(lambda key: draw(key, shape[1:]))(keys)

    def dropped(self, x: jax.Array) -> jax.Array:
        keep = lambda key, shape: jax.random.bernoulli(key, 1 - RATE, shape)
        return jnp.where(self(keep, x.shape), x / (1 - RATE), 0)


@functools.cache
def by_definition() -> list[float]:
    """The losses of a plain loop on one device."""
    params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))
    losses = []

    @jax.jit
    @jax.value_and_grad
    def loss(params: Any, step: jax.Array) -> jax.Array:
        draws = Draws(step)
        x = X + draws(jax.random.normal, X.shape)
        for block in params["blocks"].values():
            linear = block["linear"]
            x = x + draws.dropped(jnp.tanh(x @ linear["kernel"] + linear["bias"]))
        x = x * draws(jax.random.uniform, ())
        return jnp.mean((x + draws(jax.random.uniform, (1, WIDTH))) ** 2)

    for step in jnp.arange(STEPS):
        value, grads = loss(params, step)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        losses.append(float(value))
    return losses


@functools.cache
def model(kind: Any = Model) -> Any:
    return filled(lambda: kind(nnx.Rngs(0)))


def losses(
    mesh: dict[str, Any], kind: Any = Model, *, evaluate: bool = False, **policy: Any
) -> list[float]:
    """The losses of a sharded loop, and maybe that of an evaluation after it."""
    number = int(np.prod([*mesh.values()]))
    fsdp = jshard.FSDP(
        jshard.make_mesh(**mesh, devices=jax.devices()[:number]),
        jshard.Policy(min_shard_elements=0, **policy),
        units=(Block,) if kind is Model else (),
    )
    state, step = fsdp.from_model(model(kind), TX), fsdp.train_step(loss_fn, TX, SEED)
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, fsdp.shard_batch(X))
        found.append(float(metrics["loss"]))
    if evaluate:
        means = fsdp.eval_step(loss_fn, SEED)(state, fsdp.shard_batch(X))
        found.append(means.compute()["loss"])
    return found


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [
        ({"replica": 2, "fsdp": 2}, {"accumulate": 2, "remat": "full"}),
        pytest.param({"fsdp": 1}, {"accumulate": 4}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 8}, {"reshard_root": True}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "context": 2}, {}, marks=pytest.mark.slow),
    ],
)
def test_what_rngs_draw_is_that_of_a_plain_loop_on_any_mesh(mesh, policy):
    found = losses(mesh, **policy)
    np.testing.assert_allclose(found, by_definition(), rtol=1e-9)


@pytest.mark.slow
def test_what_rngs_draw_around_a_stack_is_the_same_in_stages_and_in_evaluation():
    want = losses({"fsdp": 1}, Stacked, evaluate=True)
    assert len({*want}) == STEPS + 1
    for mesh in ({"pipe": 2, "fsdp": 1}, {"pipe": 2, "fsdp": 2, "replica": 2}):
        found = losses(mesh, Stacked, evaluate=True, accumulate=2)
        np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.slow
def test_check_step_gives_a_loss_rngs_on_one_device_too():
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), units=(Block,))
    jshard.testing.check_step(fsdp, Model, loss_fn, X, tolerance=1e-9)


def refused(loss: Any, devices: int = 2, make: Any = Model, **policy: Any) -> str:
    """The line with which a loss is refused when its step is traced."""
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    policy = {"min_shard_elements": 0} | policy
    fsdp = jshard.FSDP(mesh, jshard.Policy(**policy), units=(Block,))
    state = fsdp.abstract_state(make, TX)
    batch = {"x": X, "key": jax.random.key(0)}
    with pytest.raises(jshard.UserError) as error:
        fsdp.train_step(loss, TX).trace(state, fsdp.shard_batch(batch))
    assert "\n" not in str(error.value)
    return str(error.value)


def of_output(y: jax.Array) -> Any:
    return jshard.Mean(jnp.sum(y), y.size)


OUTSIDE = nnx.Rngs(0)
TAKE = re.escape("take rngs (def loss_fn(model, batch, rngs))")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: of_output(m(b["x"])), f"dropout has no rngs: .* {TAKE}"),
        (lambda m, b: of_output(m(b["x"], OUTSIDE)), f"made outside of it; .* {TAKE}"),
        (
            lambda m, b: of_output(m(b["x"], nnx.Rngs(b["key"]))),
            f"test_rngs.py.*of .8, 4, 6. are .* same on all devices; .* {TAKE}",
        ),
        (
            lambda m, b: jshard.Mean(jax.lax.pmean(jnp.sum(b["x"]), "batch"), 1),
            "over 'batch', which is not an axis of the mesh .'replica', 'fsdp'.; leave",
        ),
        (lambda m, b, key: of_output(b["x"]), "cannot be: missing a required argument"),
    ],
    ids=["none", "outside", "same key", "pmap's axis", "another argument"],
)
def test_habits_from_other_programs_are_refused_in_a_line_that_says_what_to_write(
    loss, message
):
    assert re.search(message, refused(loss))


def test_a_key_of_all_micro_batches_draws_for_no_examples():
    def of_a_key(model: Any, batch: Any) -> Any:
        return of_output(jax.random.normal(batch["key"], batch["x"].shape) * batch["x"])

    def of_its_parts(model: Any, batch: Any) -> Any:
        noise = jax.vmap(lambda key, x: jax.random.normal(key, x.shape))
        keys = jax.random.split(batch["key"], len(batch["x"]))
        return of_output(noise(keys, batch["x"]) * batch["x"])

    assert "the same in all micro-batches" in refused(of_a_key, 1, accumulate=2)
    assert "the same on all devices" in refused(of_its_parts)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda rngs: rngs.normal((3, WIDTH)), "rngs of the step draw [3, 6]; they"),
        (lambda rngs: jax.random.gamma(rngs(), 1.0), "draw a gamma distribution; they"),
        (
            lambda rngs: jax.vmap(jax.random.uniform)(jax.random.split(rngs(), 8)),
            "draw [] for each of [8] keys; they draw for a device's 8 examples",
        ),
    ],
    ids=["another shape", "gamma", "a key an example"],
)
def test_what_rngs_cannot_draw_alike_on_every_mesh_is_refused(draw, message):
    def loss(model: Any, batch: Any, rngs: Any) -> Any:
        return of_output(batch["x"] + jnp.sum(draw(rngs)))

    assert message in refused(loss)


def test_the_model_of_a_state_is_in_the_mode_that_is_asked_for():
    fsdp = jshard.FSDP(jshard.make_mesh(devices=jax.devices()[:1]), units=(Block,))
    state = fsdp.from_model(model(), TX)
    modes = {None: False, False: True, True: False}
    for train, want in modes.items():
        made: Any = fsdp.model(state, train=train)
        assert made.blocks[0].dropout.deterministic is want
    frozen = filled(lambda: Model(nnx.Rngs(0)))
    frozen.eval()
    made: Any = fsdp.model(fsdp.from_model(frozen, TX))
    assert made.blocks[0].dropout.deterministic

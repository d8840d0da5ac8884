"""Optimizers on stacked layers: per_layer, and the sharding of their state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import hlo
import jshard
import parity
from filled import filled
from jshard.sharding.layout.layer_dims import layer_dims
from jshard.sharding.update.whole_layers import sharded_update

pytestmark = pytest.mark.usefixtures("x64")

POLICY = jshard.Policy(min_shard_elements=0)
WIDTH = 8


class Layer(nnx.Module):
    """A wide matrix and a vector, whose initial values compile in no time."""

    def __init__(self, rngs: nnx.Rngs):
        del rngs
        matrix = np.sin(np.arange(WIDTH * 16.0)).reshape(WIDTH, 16)
        self.matrix = nnx.Param(jax.device_put(matrix))
        self.vector = nnx.Param(jax.device_put(np.linspace(-1, 1, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ self.matrix[...])
        return x + h @ self.matrix[...].T * self.vector[...]


class Outer(nnx.Module):
    """A layer that holds a Stack of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = jshard.Stack(Layer, 2, rngs=rngs)
        self.own = Layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.own(self.inner(x))


class Model(nnx.Module):
    """A Stack of Stacks, a plain one of the same length, a shorter one, and a Unit."""

    def __init__(self, rngs: nnx.Rngs):
        self.outer = jshard.Stack(Outer, 3, rngs=rngs)
        self.plain = jshard.Stack(Layer, 3, rngs=rngs)
        self.short = jshard.Stack(Layer, 2, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.short(self.plain(self.outer(x))))


def unstacked(state: Any) -> dict[str, Any]:
    """Every tensor by name, as a model without Stacks would hold them."""
    tensors = {}
    for path, variable in nnx.to_flat_state(state):
        value = np.asarray(variable.get_value())
        name = ".".join(map(str, path))
        for index in np.ndindex(*value.shape[: layer_dims(variable)]):
            tensors[f"{name}{list(index)}"] = jax.device_put(value[index])
    return tensors


def random_like(state: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jax.device_put(rng.normal(size=p.shape)), state)


def check_close(got: dict[str, Any], want: dict[str, Any], bound: float = 1e-11):
    assert parity.worst(got, want) <= bound


TRANSFORMATIONS = parity.TRANSFORMATIONS | {
    "lars": lambda: optax.lars(1e-2, weight_decay=0.1),
    "adaptive clipping": lambda: optax.adaptive_grad_clip(0.01),
    "masked": lambda: optax.masked(optax.scale_by_trust_ratio(), parity.matrices),
    "injected": lambda: optax.inject_hyperparams(optax.lamb)(learning_rate=1e-2),
}


# By default test_layers_apart.py compares an optimizer of tensors with its formula.
@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_per_layer_is_the_optimizer_on_unstacked_layers(name):
    params = nnx.state(Model(nnx.Rngs(0)), nnx.Param)
    plain = unstacked(params)
    tx, plain_tx = (
        jshard.optim.per_layer(TRANSFORMATIONS[name]()),
        TRANSFORMATIONS[name](),
    )
    state, plain_state = tx.init(params), plain_tx.init(plain)
    for step in range(3):
        grads = random_like(params, step)
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        plain_updates, plain_state = jax.jit(plain_tx.update)(
            unstacked(grads), plain_state, plain
        )
        plain = optax.apply_updates(plain, plain_updates)
    check_close(unstacked(params), plain)


def test_per_layer_is_the_optimizer_itself_without_stacks():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    tx = jshard.optim.per_layer(optax.lamb(1e-2))
    first = lambda tx: tx.update(params, tx.init(params), params)[0]
    updates, want = jax.jit(lambda: (first(tx), first(optax.lamb(1e-2))))()
    check_close(updates, want)


def times_value() -> optax.GradientTransformationExtraArgs:
    """Needs an extra argument, no parameters, and multiplies matrices."""

    def update(updates, state, params=None, *, value, **extra):
        del params, extra
        cube = jshard.optim.whole_layers(lambda g: g @ g.T @ g)
        cubed = lambda g: cube(g) * value if g.ndim == 2 else g * value
        return jax.tree.map(cubed, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def update_on(fsdp: jshard.FSDP, tx: Any) -> Any:
    """The jitted update of the training step alone."""

    def update(grads: Any, opt_state: Any, params: Any, **extra: Any) -> Any:
        with sharded_update(fsdp.mesh, fsdp.policy):
            return tx.update(grads, opt_state, params, **extra)

    return jax.jit(update)


@pytest.mark.quick("False-True")
@pytest.mark.parametrize("with_params", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_extra_arguments_reach_every_layer(sharded, with_params):
    devices = jax.devices()[: 8 if sharded else 1]
    fsdp = jshard.FSDP(jshard.make_mesh(devices=devices), POLICY)
    tx = optax.chain(optax.identity(), jshard.optim.per_layer(times_value()))
    state = fsdp.from_model(Model(nnx.Rngs(0)), tx)
    got, _ = update_on(fsdp, tx)(
        state.params,
        state.opt_state,
        state.params if with_params else None,
        value=jnp.asarray(3.0),
        unused=1,
    )
    want, _ = times_value().update(unstacked(state.params), (), value=3.0)
    check_close(unstacked(got), want)


def make_stack(layers: int, shape: tuple[int, ...]) -> Any:
    """Only a Stack, of one parameter."""

    class Single(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.matrix = nnx.Param(rngs.normal(shape))

    class Stacked(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = jshard.Stack(Single, layers, rngs=rngs)

    return Stacked


def matrices_moved(make: Any) -> list[Any]:
    """All-to-alls of matrices in an update by Muon, which is that of one device."""
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), POLICY)
    tx = jshard.optim.muon(1e-2)
    state = fsdp.from_model(filled(lambda: make(nnx.Rngs(0))), tx)
    args = (state.params, state.opt_state, state.params)
    update = update_on(fsdp, tx).lower(*args).compile()
    check_close(unstacked(update(*args)[0]), muon_updates(state.params))

    moved = hlo.collectives(update.as_text())
    matrices = [c for c in moved if sum(a.size for a in c.results) >= WIDTH * WIDTH]
    assert {(c.kind, c.group) for c in matrices} == {("all-to-all", 4)}
    return matrices


@pytest.mark.slow  # layout/test_padding.py has padded layers
@pytest.mark.parametrize("layers", [1, 3, 4, 9])
def test_whole_matrix_optimizers_move_layers_and_gather_none(layers):
    matrices = matrices_moved(make_stack(layers, (WIDTH, WIDTH)))
    # A device gets one whole layer at a time, and hands its shards back: parameter,
    # gradient and momentum in, update and momentum out.
    assert {sum(a.size for a in c.results) for c in matrices} == {WIDTH * WIDTH}
    rounds = -(-layers // 4)
    assert sum(c.times for c in matrices) <= 5 * rounds


def test_matrices_of_one_shape_outside_stacks_are_exchanged_in_common():
    class Listed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            linear = lambda n: nnx.Linear(WIDTH, n, param_dtype=jnp.float64, rngs=rngs)
            of = lambda n: jshard.Unit(linear(n))
            self.squares = nnx.List([of(WIDTH) for _ in range(5)])
            self.wide = of(2 * WIDTH)

    matrices = matrices_moved(Listed)
    # There and back: two rounds of the five squares on four devices, and the other one.
    elements = sum(sum(a.size for a in c.results) * c.times for c in matrices)
    assert elements <= 2 * (2 + 2) * WIDTH * WIDTH


@pytest.mark.slow  # by default test_whole_layers.py has replicated layers
def test_whole_matrix_optimizers_update_replicated_stacks_too():
    fsdp = jshard.FSDP(jshard.make_mesh(), jshard.Policy(min_shard_elements=36))
    tx = jshard.optim.muon(1e-2)
    state = fsdp.init(make_stack(3, (5, 7)), tx)
    assert set(specs(state.params).values()) == {P()}
    got, _ = update_on(fsdp, tx)(state.params, state.opt_state, state.params)
    check_close(unstacked(got), muon_updates(state.params))


def muon_updates(params: Any) -> dict[str, Any]:
    """Muon's first updates of the unstacked parameters, on one device."""
    plain, tx = unstacked(params), optax.contrib.muon(1e-2)
    updates, _ = tx.update(plain, tx.init(plain), plain)
    return dict(updates)  # pyright: ignore[reportCallIssue, reportArgumentType]


class Small(nnx.Module):
    """A Stack and a Unit."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = jshard.Stack(Layer, 2, rngs=rngs)
        self.head = jshard.Unit(Layer(rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.layers(x))


def train(fsdp: jshard.FSDP, tx: Any, steps: int = 2, model: Any = Model) -> Any:
    def loss_fn(model, x):
        return jshard.Mean(jnp.sum(model(x) ** 2), x.shape[0])

    state = fsdp.from_model(model(nnx.Rngs(0)), tx)
    step = fsdp.train_step(loss_fn, tx)
    for seed in range(steps):
        x = np.random.default_rng(seed).normal(size=(16, WIDTH))
        state, _ = step(state, fsdp.shard_batch(x))
    return state


def labels(params: Any) -> Any:
    """Muon for what is in the outer Stack, Adam for the rest."""
    name = lambda path, _: "muon" if "outer" in str(path) else "adam"
    return jax.tree_util.tree_map_with_path(name, params)


WRAPPED = {
    "muon on nested stacks": lambda: jshard.optim.muon(1e-2),
    "multi_transform": lambda: optax.multi_transform(
        {
            "muon": jshard.optim.muon(1e-2),
            "adam": optax.adam(1e-2),
        },
        labels,
    ),
    "multi_steps": lambda: optax.MultiSteps(
        jshard.optim.per_layer(optax.lamb(1e-2)), every_k_schedule=2
    ).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(
        lambda learning_rate: jshard.optim.per_layer(optax.lamb(learning_rate))
    )(learning_rate=optax.linear_schedule(1e-2, 0, 10)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_optimizers_train_alike_on_one_device_and_on_a_hybrid_mesh(name):
    states = [
        train(jshard.FSDP(mesh, POLICY), WRAPPED[name]())
        for mesh in (
            jshard.make_mesh(devices=jax.devices()[:1]),
            jshard.make_mesh(replica=2),
        )
    ]
    want, got = (unstacked(state.params) for state in states)
    check_close(got, want)


# The sharding of optimizer state.

MOMENTS = {
    "sgd": ["trace"],
    "adamw": ["mu", "nu"],
    "lion": ["mu"],
    "adafactor": ["ema"],
    "lamb": ["mu", "nu"],
    "muon": ["mu"],
}


def specs(state: Any) -> dict[tuple, Any]:
    return {
        path: variable.get_value().sharding.spec
        for path, variable in nnx.to_flat_state(state)
        if jax.tree.leaves(variable)  # not masked
    }


def found(opt_state: Any, name: str) -> list[Any]:
    states = optax.tree.get_all_with_path(opt_state, name)
    return [value for _, value in states if isinstance(value, nnx.State)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        *((name, parity.of_layers) for name in MOMENTS),
        *(
            (name, lambda name: parity.TRANSFORMATIONS[name]())
            for name in parity.ELEMENTWISE
        ),
    ],
)
def test_moments_are_sharded_like_their_parameters(name, wrap):
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), POLICY)
    tx = wrap(name)
    params = specs(fsdp.abstract_state(Model, tx).params)
    assert params["outer", "inner", "matrix"] == P(None, None, "fsdp")
    assert params["head", "vector"] == P("fsdp")
    for state in (fsdp.abstract_state(Model, tx), train(fsdp, tx, steps=1)):
        for moment in MOMENTS[name]:
            sharded = {}
            for part in found(state.opt_state, moment):
                sharded |= specs(part)
            assert sharded == params


@pytest.mark.slow  # test_collectives.py has Adafactor
def test_factored_statistics_and_counts_are_replicated():
    fsdp = jshard.FSDP(jshard.make_mesh(), POLICY)
    tx = jshard.optim.per_layer(parity.TRANSFORMATIONS["adafactor"]())
    state = train(fsdp, tx, steps=1, model=Small)
    for statistic in ("v_row", "v_col"):
        parts = found(state.opt_state, statistic)
        assert parts
        assert all(set(specs(part).values()) == {P()} for part in parts)
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert counts
    assert all(count.sharding.is_fully_replicated for _, count in counts)

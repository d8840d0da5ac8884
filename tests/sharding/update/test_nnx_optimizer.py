"""An nnx.Optimizer in mid-training goes on sharded, and comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from filled import filled
from parity import make_mesh

WIDTH = 5  # which no mesh here divides
X = np.random.default_rng(0).standard_normal((16, WIDTH))
HEAD = nnx.All(nnx.Param, nnx.PathContains("head"))
POLICY = jshard.Policy(min_shard_elements=0)


def linear(rngs: nnx.Rngs, out: int = WIDTH) -> nnx.Linear:
    return nnx.Linear(WIDTH, out, param_dtype=float, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = linear(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Scanned(Block):
    pass


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.head = Block(rngs), linear(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.first(x))


class Stacked(Plain):
    """With layers in a Stack, and some that Flax stacked."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.stack = jshard.Stack(Block, 2, rngs=rngs)
        self.scanned = nnx.split_rngs(splits=2)(nnx.vmap(Scanned))(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        axes: Any = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
        scan = nnx.scan(lambda x, layer: layer(x), **axes)
        return super().__call__(scan(self.stack(x), self.scanned))


def loss_fn(model: Any, x: jax.Array) -> jshard.Mean:
    return jshard.Mean(jnp.sum((model(x) - jnp.sin(x)) ** 2), x.size)


def old_loop(wrt: Any = nnx.Param) -> Any:
    """The step of Flax's guides."""

    @nnx.jit
    def step(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        mean = lambda model: jnp.mean((model(x) - jnp.sin(x)) ** 2)
        loss, grads = nnx.value_and_grad(mean, argnums=nnx.DiffState(0, wrt))(model)
        optimizer.update(model, grads)
        return loss

    return step


def run(step: Any, model: Any, optimizer: Any, steps: int) -> list[float]:
    return [float(step(model, optimizer, X)) for _ in range(steps)]


def kernels(params: Any) -> Any:
    """A mask of paths, as one of ranks is not the same for a Stack and its layers."""
    is_kernel = lambda path, _: "kernel" in jax.tree_util.keystr(path)
    return jax.tree_util.tree_map_with_path(is_kernel, params)


RATE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 4, 12)
OPTIMIZERS = {
    "adamw": optax.adamw(RATE),
    "a mask": optax.adamw(1e-2, mask=kernels),
    "a chain": optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    ),
    "MultiSteps": optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
}
PARTS = {
    "first": "a mask",
    "stack": "a chain",
    "scanned": "MultiSteps",
    "head": "momentum",
}


def of_parts() -> optax.GradientTransformation:
    def one(path: tuple, _: Any) -> str:
        text = jax.tree_util.keystr(path)
        return next(PARTS[name] for name in PARTS if name in text)

    label = lambda params: jax.tree_util.tree_map_with_path(one, params)
    return optax.partition({x: OPTIMIZERS[x] for x in PARTS.values()}, label)


def go_on(tx: Any, make: Any, units: Any, mesh: Any, wrt: Any = nnx.Param) -> tuple:
    """Holds sharded steps to the old loop, from its third on."""
    fsdp = jshard.FSDP(mesh, POLICY, units=units)
    model, step = filled(make), old_loop(wrt)
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    run(step, model, optimizer, 3)
    state = fsdp.from_model(model, optimizer, wrt)
    train_step, losses = fsdp.train_step(loss_fn, tx), []
    batch = fsdp.shard_batch(X)
    for _ in range(4):
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
    np.testing.assert_allclose(losses, run(step, model, optimizer, 4), rtol=1e-9)
    assert state.step == 7
    back = come_back(fsdp, state, tx, wrt)
    old, new = nnx.state(optimizer), nnx.state(back[1])
    kinds = lambda x: [(path, type(v)) for path, v in nnx.to_flat_state(x)]
    assert kinds(new) == kinds(old)
    for got, want in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)
    return step, (model, optimizer), back


def come_back(fsdp: jshard.FSDP, state: Any, tx: Any, wrt: Any = nnx.Param) -> tuple:
    """Returns a state's model and nnx.Optimizer, which make the same state."""
    back = fsdp.model(state), fsdp.to_optimizer(state, tx, wrt)
    again = fsdp.from_model(*back, wrt)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding)
        np.testing.assert_array_equal(one, other)
    return back


@pytest.mark.quick("momentum")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_losses_are_those_of_the_old_loop_and_it_goes_on_after(name, request):
    units = (Block, nnx.Linear)
    make = lambda: Plain(nnx.Rngs(0))
    step, before, back = go_on(OPTIMIZERS[name], make, units, make_mesh(1, 2))
    if request.node.get_closest_marker("slow"):  # to compile it again takes long
        want = run(step, *before, steps=2)
        np.testing.assert_allclose(run(step, *back, steps=2), want, rtol=1e-9)


def test_a_stack_and_what_flax_stacked_are_padded_and_come_back_exactly():
    tx, units = OPTIMIZERS["momentum"], {Block: 0, Scanned: 1, nnx.Linear: 0}
    fsdp = jshard.FSDP(make_mesh(2, 2), POLICY, units=units)
    model = filled(lambda: Stacked(nnx.Rngs(0)))
    kept = nnx.Optimizer(model, tx, wrt=nnx.Param)
    change = lambda x: (
        x + np.asarray(7 * np.random.default_rng(1).random(x.shape), x.dtype)
    )
    nnx.update(kept, jax.tree.map(change, nnx.state(kept)))
    state = fsdp.from_model(model, kept)
    _, back = come_back(fsdp, state, tx)
    assert state.opt_state[0].trace["stack"]["linear"]["kernel"].shape == (2, 6, WIDTH)
    for one, other in zip(
        jax.tree.leaves(nnx.state(kept)), jax.tree.leaves(nnx.state(back)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


# Flax's own scan is handed a layer's parameters.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is read outside of its unit, or handed")
@pytest.mark.usefixtures("x64")
def test_layers_in_stacks_go_on_as_in_the_old_loop():
    units = {Block: 0, Scanned: 1, nnx.Linear: 0}
    go_on(of_parts(), lambda: Stacked(nnx.Rngs(0)), units, make_mesh(2, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_part_that_is_trained_goes_on():
    units, mesh = (Block, nnx.Linear), make_mesh(1, 2)
    go_on(OPTIMIZERS["adamw"], lambda: Plain(nnx.Rngs(0)), units, mesh, HEAD)


# Errors.


class Own(nnx.Optimizer):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs)


@pytest.fixture(scope="module")
def fsdp():
    return jshard.FSDP(make_mesh(1, 2), POLICY, units=(Block, nnx.Linear))


TX = OPTIMIZERS["momentum"]


def made(wrt: Any = nnx.Param, kind: Any = nnx.Optimizer) -> tuple[Plain, Any]:
    model = filled(lambda: Plain(nnx.Rngs(0)))
    return model, kind(model, TX, wrt=wrt)


def with_more() -> tuple[Plain, Any]:
    model, optimizer = made()
    model.more = linear(nnx.Rngs(0))  # pyright: ignore[reportAttributeAccessIssue]
    return model, optimizer


def of_less() -> tuple[Plain, Any]:
    return made()[0], nnx.Optimizer(with_more()[0], TX, wrt=nnx.Param)


def resized() -> tuple[Plain, Any]:
    model, optimizer = made()
    model.head = linear(nnx.Rngs(0), 8)
    return model, optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: made(HEAD),
            r"the wrt of fsdp\.from_model selects 'first\.linear\.bias', which the wrt "
            r"of the nnx\.Optimizer does not; pass wrt=optimizer\.wrt",
        ),
        (with_more, r"Optimizer has no '0\.trace\.more\.bias', which .* as it is now"),
        (of_less, r"Optimizer has '0\.trace\.more\.bias', which its tx does not keep"),
        (resized, r"has float\[5\] at '0\.trace\.head\.bias', where .* float\[8\]"),
        (lambda: made(kind=Own), r"of class Own, whose own update .* pass a plain one"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_one_line(fsdp, make, message):
    with pytest.raises(jshard.UserError, match=message) as error:
        fsdp.from_model(*make())
    assert "\n" not in str(error.value)


def test_a_plain_optimizer_takes_the_state_of_one_with_its_own_update(fsdp):
    model, optimizer = made(kind=Own)
    optimizer.step[...] = 3
    plain = nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt)
    plain.step, plain.opt_state = optimizer.step, optimizer.opt_state
    state = fsdp.from_model(model, plain)
    assert state.step == 3
    refusals: Any = {
        "made with selects 'first.linear.bias', which wrt does not": (TX, HEAD),
        "state.opt_state has no '0.count', which its tx keeps": (optax.adam(1e-2),),
        "optimizer is an nnx.Optimizer; pass optimizer.tx": (plain,),
    }
    for message, args in refusals.items():
        with pytest.raises(jshard.UserError, match=message):
            fsdp.to_optimizer(state, *args)
    shapes = fsdp.abstract_state(Plain, TX)
    with pytest.raises(jshard.UserError, match="the state has shapes and no arrays"):
        fsdp.to_optimizer(shapes, TX)


@pytest.mark.parametrize(
    "tx", [jshard.optim.per_layer(optax.adam(0.1)), jshard.optim.muon(0.1)]
)
def test_layers_that_flax_hides_from_per_layer_are_one_line_in_its_loop(tx):
    model = Stacked(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = nnx.grad(lambda model: jnp.sum(model(X)))(model)
    with pytest.raises(jshard.UserError, match=r"per_layer: .* nnx\.Optimizer does"):
        optimizer.update(model, grads)

"""models/t5.py on meshes: two Stacks, of which one reads what the other computed."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hlo
import jshard
from filled import filled
from jshard.models.t5 import T5, T5Config
from jshard.models.t5_attention import position_buckets
from jshard.sharding.layout.layer_dims import layer_dims
from parity import every_pair, make_mesh

B, S, T, V = 16, 10, 6, 72
LAYERS, DECODER_LAYERS = 2, 3
STYLES = {"v1.0": {}, "v1.1": {"gated": True, "tied": False}}


def config(style: str, dtype: Any = jnp.float32) -> T5Config:
    sizes: dict[str, Any] = {
        "vocab_size": V,
        "num_layers": LAYERS,
        "num_decoder_layers": DECODER_LAYERS,
        "num_heads": 2,
        "head_width": 8,
        "width": 24,
        "hidden": 56,
        "buckets": 8,
        "max_distance": 12,
        "loss_chunk": 5,
        "dtype": dtype,
        "param_dtype": dtype,
    }
    return T5Config(**sizes | STYLES[style])


class Layers(nnx.Module):
    """A plain list in place of a Stack."""

    def __init__(self, make: Any, number: int):
        self.layers = nnx.List([make() for _ in range(number)])

    def __call__(self, x: Any, *args: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *args)
        return x


def plain(model: T5) -> T5:
    """The same model with lists of layers, with the same values."""
    copy = nnx.clone(model)
    for side in ("encoder", "decoder"):
        stack = getattr(copy, side)
        graphdef, state = nnx.split(stack)
        state = jax.device_get(state)
        number = len(jax.tree.leaves(state)[0])
        made = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(number)]
        layers = [nnx.merge(graphdef, one) for one in made]
        for layer in layers:
            object.__setattr__(layer, "__class__", type(stack).plain_class)
        found = iter(layers)
        setattr(copy, side, Layers(lambda found=found: next(found), number))
    return copy


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = (np.arange(T) < rng.integers(1, T + 1, (B, 1))) * 1.0
    weights[-3:] = 0  # a device that sees nothing but padding
    return {
        "inputs": rng.integers(0, V, (B, S)),
        "mask": np.arange(S) < rng.integers(2, S + 1, (B, 1)),
        "targets": rng.integers(0, V, (B, T)),
        "weights": weights,
    }


def loss_fn(model: T5, batch: dict[str, Any]) -> jshard.Mean:
    return model.loss(
        batch["inputs"], batch["targets"], batch["weights"], batch["mask"]
    )


def values(state: Any) -> dict[str, Any]:
    """Arrays by name, those of a Stack by layer."""
    found = {}
    for path, variable in nnx.to_flat_state(state):
        names = [str(name) for name in path if name != "layers"]
        if layer_dims(variable) and not names[1].isdigit():
            # In NumPy, as JAX would compile a program for each index.
            for i, value in enumerate(np.asarray(variable.get_value())):
                found[".".join([names[0], str(i), *names[1:]])] = value
        else:
            found[".".join(names)] = variable.get_value()
    return found


def check_close(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        size = np.max(np.abs(want[name]))
        np.testing.assert_allclose(got[name], want[name], 0, 1e-9 * size, err_msg=name)


@pytest.mark.slow  # by default, that of test_decoder_family
@pytest.mark.usefixtures("x64")
@every_pair(
    mesh=((2, 4), (1, 8)),
    remat=("full", "dots", "none"),
    prefetch=(True, False),
    accumulate=(2, 1),
    style=tuple(STYLES),
    reshard=(True, False, 2),
)
def test_training_follows_one_device_with_lists_of_layers(case):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))
    policy = jshard.Policy(
        min_shard_elements=0,
        remat=case["remat"],
        prefetch=case["prefetch"],
        accumulate=case["accumulate"],
        reshard_after_forward=case["reshard"],
    )
    fsdp = jshard.FSDP(make_mesh(*case["mesh"]), policy)
    model = filled(lambda: T5(config(case["style"], jnp.float64), rngs=nnx.Rngs(0)))
    state = fsdp.from_model(model, tx)
    step = fsdp.train_step(loss_fn, tx)

    graphdef, params, rest = nnx.split(plain(model), nnx.Param, ...)
    opt_state = jax.jit(tx.init)(params)

    @jax.jit
    def plain_step(params, opt_state, batch):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            return loss_fn(model, batch).compute()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for i in range(2):
        state, metrics = step(state, fsdp.shard_batch(batch(i)))
        params, opt_state, want = plain_step(params, opt_state, batch(i))
        np.testing.assert_allclose(metrics["loss"], want, rtol=1e-9)
    check_close(values(fsdp.fetch(state.params)), values(params))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("prefetch", [True, False])
def test_each_decoder_layer_alone_sends_its_gradient_to_the_encoder(prefetch):
    fsdp = jshard.FSDP(
        make_mesh(2, 4), jshard.Policy(min_shard_elements=0, prefetch=prefetch)
    )
    tx = optax.sgd(1.0)
    step = fsdp.train_step(loss_fn, tx)
    for layer in range(DECODER_LAYERS):
        model: Any = T5(config("v1.1", jnp.float64), rngs=nnx.Rngs(0))
        kernel = model.decoder.cross.out.kernel
        only = np.zeros_like(kernel.get_value())
        only[layer] = kernel.get_value()[layer]
        kernel.set_value(jax.device_put(only))
        before = values(nnx.state(model, nnx.Param))
        state, _ = step(fsdp.from_model(model, tx), fsdp.shard_batch(batch()))
        after = values(fsdp.fetch(state.params))
        grads = nnx.grad(lambda model: loss_fn(model, batch()).compute())(plain(model))
        want = {name: -grad for name, grad in values(grads).items()}
        got = {name: after[name] - before[name] for name in after}
        assert np.abs(got["encoder.0.attention.q.kernel"]).max() > 0
        for name in want:
            np.testing.assert_allclose(got[name], want[name], 0, 1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_a_step_gathers_weights_and_nothing_that_the_sides_exchange(style, prefetch):
    policy = jshard.Policy(min_shard_elements=0, prefetch=prefetch)
    fsdp = jshard.FSDP(make_mesh(1, 8), policy)
    tx, small = optax.sgd(0.1), config(style)
    state = fsdp.abstract_state(lambda rngs: T5(small, rngs=rngs), tx)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    text = hlo.compile(fsdp.train_step(loss_fn, tx).lower(state, types)).as_text()

    found: Counter = Counter()
    for c in hlo.collectives(text):
        whole = c.results if c.kind == "all-gather" else c.operands
        if c.kind == "all-to-all":  # an operand for each device
            found[c.kind, sum(array.size for array in whole)] += c.times
            continue
        for array in whole:
            if not (c.kind == "all-reduce" and hlo.is_number(array)):
                found[c.kind, array.size] += c.times
    expected: Counter = Counter()
    for path, variable in nnx.to_flat_state(state.params):
        shape = variable.get_value().shape
        layers, again = 1, 0
        if path[0] in ("encoder", "decoder"):
            layers, *shape = shape
            again = layers - prefetch  # the last layer's are still there
        size = int(np.prod(shape))
        if path[-2:] == ("embed", "embedding") and not small.tied:
            continue
        expected["all-gather", size] += layers + again
        expected["reduce-scatter", size] += layers
    if not small.tied:  # both texts are looked up at once, and again their gradients
        tokens = B // 8 * (S + T)
        expected["all-to-all", tokens * small.width] += 2
        expected["all-to-all", B * (S + T)] += 1
    assert found == expected


@pytest.mark.slow  # test_encoder_decoder.py pads prompts
def test_padding_changes_nothing_before_it():
    model = filled(lambda: T5(config("v1.0"), rngs=nnx.Rngs(0)))
    inputs, tokens = batch()["inputs"], batch()["targets"]
    call = nnx.jit(lambda model, *inputs: model(*inputs))
    want = call(model, inputs[:, :7], tokens)
    padded = call(model, inputs, tokens, np.broadcast_to(np.arange(S) < 7, (B, S)))
    np.testing.assert_allclose(padded, want, rtol=1e-4, atol=1e-5)
    changed = np.where(np.arange(T) < 4, tokens, 0)
    np.testing.assert_allclose(
        call(model, inputs[:, :7], changed)[:, :4], want[:, :4], rtol=1e-4, atol=1e-5
    )


def test_classes_of_positions():
    for bidirectional in (True, False):
        found = position_buckets(
            300, 300, bidirectional=bidirectional, buckets=32, max_distance=128
        )
        assert found.min() == 0
        assert found.max() == 31
        first, last = found[:, 0], found[0]  # keys before the query, and after it
        assert (np.diff(first) >= 0).all()
        assert (first[:8] == np.arange(8)).all()
        assert len(set(first[128:])) == 1
        assert (last[1:].min() > 15) == bidirectional


def test_sizes_of_positions_that_do_not_fit_are_a_users_error():
    with pytest.raises(jshard.UserError, match="buckets=6 must be a multiple of 4"):
        T5Config(buckets=6)

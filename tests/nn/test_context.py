"""Sequences split over devices: `make_mesh(context=)`.

The reference is the model as an ordinary Flax module, on one device, with JAX and optax
alone, in float64.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from jshard.describe import traffic
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig

TIME, VOCABULARY, STEPS = 24, 40, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "width": 16,
    "loss_chunk": 16,
    "attention": "blockwise",  # in the inputs' dtype throughout
    "dtype": jnp.float64,
    "param_dtype": jnp.float64,
}
LLAMA: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden": 32,
    "sequence_length": TIME,
}


def gpt(rngs, **sizes):
    own = {"num_heads": 4, "sequence_length": TIME, "dropout": 0.1}
    return GPT(GPTConfig(**SIZES | own | sizes), rngs=rngs)


def llama(rngs, **sizes):
    return Llama(LlamaConfig(**SIZES | LLAMA | sizes), rngs=rngs)


MODELS = {
    "gpt": gpt,
    "gpt in float32": functools.partial(
        gpt, dtype=jnp.float32, param_dtype=jnp.float32
    ),
    "two heads": functools.partial(gpt, num_heads=2),
    "llama": llama,
    "windows": functools.partial(llama, pattern="sf", window=5),
    "experts": functools.partial(
        llama, num_experts=4, experts_per_token=2, balance_weight=0.01
    ),
}


def batch(packed: bool, step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCABULARY, (8, TIME + 1))
    found: dict[str, Any] = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    found["weights"] = 1.0 * (rng.random((8, TIME)) > 0.2)
    if packed:
        segments = np.sort(rng.integers(0, 3, (8, TIME)), axis=1)
        first = np.array([[np.argmax(r == s) for s in r] for r in segments])
        found |= {"segments": segments, "positions": np.arange(TIME) - first}
    return found


def loss_fn(model: Any, batch: Any) -> Any:
    packed = {}
    if "segments" in batch:
        packed["segment_ids_BT"] = batch["segments"]
        packed["positions_BT"] = batch["positions"]
    return model.loss(batch["inputs"], batch["targets"], batch["weights"], **packed)


@functools.cache
def plain(model: str, packed: bool, optimizer: str) -> tuple[list[float], dict]:
    """Losses and final parameters without jshard's steps, on one device."""
    graphdef, params, rest = nnx.split(
        MODELS[model](nnx.Rngs(jax.random.key(0))), nnx.Param, ...
    )
    tx = parity.TRANSFORMATIONS[optimizer]()
    # As jshard does: an optimizer that looks at whole tensors sees each layer alone.
    tx = tx if optimizer in parity.ELEMENTWISE else jshard.per_layer(tx)

    @jax.jit
    def step(params, rest, opt_state, batch):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = loss_fn(model, batch).compute()
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, value

    opt_state, losses = tx.init(params), []
    for number in range(STEPS):
        arguments = params, rest, opt_state, batch(packed, number)
        params, rest, opt_state, value = step(*arguments)
        losses.append(float(value))
    return losses, parity.by_path(params)


def start(model: str, optimizer: str = "adamw", **options: Any) -> tuple:
    """(fsdp, state, train step) on a mesh; other options are those of the policy."""
    names = ("replica", "fsdp", "context", "devices")
    mesh = {name: options.pop(name) for name in names if name in options}
    policy = jshard.Policy(min_shard_elements=0, **options)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    tx = parity.TRANSFORMATIONS[optimizer]()
    tx = tx if optimizer in parity.ELEMENTWISE else jshard.per_layer(tx)
    return fsdp, fsdp.init(MODELS[model], tx), fsdp.train_step(loss_fn, tx)


CASES = {
    "gpt": ("gpt", True, "adamw", {"context": 4, "accumulate": 2}),
    "fewer heads than devices": ("two heads", False, "adamw", {"context": 8}),
    "hybrid": ("llama", True, "sgd", {"replica": 2, "context": 2, "remat": "dots"}),
    "three devices": (
        "llama",
        True,
        "adamw",
        {"context": 3, "remat": "none", "devices": 3},
    ),
    "windows": ("windows", True, "adamw", {"context": 4, "prefetch": True}),
    "experts": ("experts", False, "adamw", {"context": 2, "reshard_after_forward": 2}),
    "muon": ("gpt", False, "muon", {"replica": 2, "context": 2, "unroll": True}),
    "deferred": (
        "llama",
        False,
        "adamw",
        {"context": 2, "accumulate": 2, "defer_scatter": True},
    ),
}


@pytest.mark.filterwarnings("ignore:attention. context=8 does not divide the 2 heads")
@pytest.mark.quick("gpt")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_sequences_train_as_whole_ones_on_one_device(case):
    model, packed, optimizer, options = case
    options = dict(options)
    if number := options.get("devices"):
        options["devices"] = jax.devices()[:number]
    losses, params = plain(model, packed, optimizer)
    fsdp, state, train_step = start(model, optimizer, **options)
    found = []
    for number in range(STEPS):
        state, metrics = train_step(state, fsdp.shard_batch(batch(packed, number)))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert parity.worst(parity.by_path(fsdp.unshard(state.params)), params) <= 1e-9


@pytest.mark.usefixtures("x64")
def test_dropout_drops_the_same_values_of_split_sequences():
    def masks(**mesh):
        fsdp = jshard.FSDP(jshard.make_mesh(**mesh))

        class Drops(nnx.Module):
            splits_sequences = True

            def __init__(self, rngs):
                self.weight = nnx.Param(jnp.ones((8, 4)))
                self.dropout = jshard.Dropout(0.5, rngs=rngs)

        def loss_fn(model, batch):
            kept = model.dropout(batch["ones"] * model.weight[0])
            # A different number for every place of the batch: their sum tells all.
            return jshard.Mean(jnp.sum(kept * batch["bits"]), 1)

        tx = optax.sgd(0.0)
        state, step = fsdp.init(Drops, tx), fsdp.train_step(loss_fn, tx)
        bits = 2.0 ** np.arange(8 * 2 * 4).reshape(8, 2, 4).repeat(2, axis=1)
        bits[:, 1::2] *= 3
        batch = {"ones": np.ones((8, 4, 4)), "bits": bits % (2**31 - 1)}
        values = []
        for _ in range(2):
            state, metrics = step(state, fsdp.shard_batch(batch))
            values.append(float(metrics["loss"]))
        return values

    whole = masks()
    assert whole[0] != whole[1]
    assert masks(context=4) == masks(context=2, replica=2) == whole


@pytest.mark.usefixtures("x64")
def test_attention_exchanges_heads_four_times_a_layer_and_pass():
    fsdp, state, train_step = start("llama", context=2, remat="none")
    shards = fsdp.shard_batch(batch(False, 0))
    jaxpr = train_step.trace(state, shards).jaxpr.jaxpr
    found = traffic(jaxpr, dict(fsdp.mesh.shape))["all-to-all", "float64"]
    layers, rows, time, width, kv_width = 2, 2, TIME // 2, 16, 8
    tokens = rows * time
    # Queries and outputs, keys and values; half of each leaves for the other device.
    a_pass = tokens * (2 * width + 2 * kv_width) * 8 // 2
    looked_up = tokens * width * 8 * 7 // 8  # rows of the embedding's table
    assert found.count == layers * 2 * 4 + 2
    assert found.wire_bytes == layers * 2 * a_pass + 2 * looked_up


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_axis_costs_no_memory_of_the_state():
    def bytes_a_device(**mesh):
        _, state, _ = start("gpt", **mesh)
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return sum(x.addressable_shards[0].data.nbytes for x in leaves)

    assert bytes_a_device(context=4) == bytes_a_device(fsdp=8)


@pytest.mark.slow
def test_checkpoints_go_from_any_mesh_to_any_other_bit_for_bit(tmp_path):
    fsdp, state, train_step = start("gpt in float32")
    state, _ = train_step(state, fsdp.shard_batch(batch(False, 0)))
    want = fsdp.unshard(state)
    meshes = [
        {},
        {"fsdp": 2, "context": 4},
        {"fsdp": 1, "context": 2, "replica": 4},
        {"fsdp": 4, "devices": jax.devices()[:4]},
    ]
    for number, mesh in enumerate(meshes[1:]):
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(state)
        other, abstract, _ = start("gpt in float32", **mesh)
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            state = checkpointer.restore(abstract)
        jax.tree.map(np.testing.assert_array_equal, other.unshard(state), want)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_predictions_have_whole_sequences():
    def logits(**mesh):
        fsdp, state, _ = start("gpt", **mesh)
        predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
        examples = fsdp.shard_examples({"inputs": batch(False, 0)["inputs"]})
        return fsdp.unshard(predict(state, examples))

    np.testing.assert_allclose(logits(context=4), logits(), rtol=1e-9)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)


def test_a_model_that_does_not_say_it_can_is_refused():
    fsdp = jshard.FSDP(jshard.make_mesh(context=2))
    with pytest.raises(jshard.UserError, match="context=2, but Plain does not say"):
        fsdp.init(Plain, optax.sgd(0.1))


@pytest.mark.slow
def test_heads_that_do_not_divide_are_filled_up_with_a_warning():
    fsdp, state, train_step = start("gpt in float32", context=8)
    shards = fsdp.shard_batch(batch(False, 0))
    with pytest.warns(UserWarning, match="context=8 does not divide the 4 heads, so 4"):
        train_step.trace(state, shards)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"context": 3}, "replica=1 x context=3 does not divide the 8 devices"),
        ({"context": 0}, "context=0 must be at least 1"),
        ({"context": 2, "fsdp": 8}, "context=2 x fsdp=8 needs 16 devices"),
        ({"context": 16, "replica": "hosts"}, "context=16 does not divide the 8"),
    ],
)
def test_meshes_that_cannot_be_are_refused_in_one_line(mesh, message):
    with pytest.raises(jshard.UserError, match=message):
        jshard.make_mesh(**mesh)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (8, 23),
            r"'inputs'. of shape .8, 23.: its sequences do not divide by .*=4",
        ),
        ((3, 24), "3 examples does not divide by 2 groups of context=4 devices"),
    ],
)
def test_batches_that_do_not_divide_are_refused_in_one_line(shape, message):
    fsdp = jshard.FSDP(jshard.make_mesh(context=4))
    with pytest.raises(jshard.UserError, match=message):
        fsdp.shard_batch({"inputs": np.zeros(shape, np.int32)})


def test_specs_of_plain_pytrees_must_name_both_axes():
    from jax.sharding import PartitionSpec

    mesh = jshard.make_mesh(context=2)

    def gathers(shards):
        return jshard.gather(shards, PartitionSpec("fsdp"))

    mapped = jax.shard_map(
        gathers, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec()
    )
    with pytest.raises(jshard.UserError, match=r"name .*'fsdp', 'context'.* in place"):
        mapped(np.zeros(8, np.float32))

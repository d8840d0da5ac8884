"""Whole models whose experts are split over devices: `make_mesh(expert=)`.

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
from jshard.nn.experts import exchanged_bytes, gathered_bytes
from models.llama import Llama, LlamaConfig

TIME, VOCABULARY, EXPERTS, STEPS = 12, 24, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "sequence_length": TIME,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "width": 16,
    "hidden": 24,
    "num_experts": EXPERTS,
    "experts_per_token": 2,
    "balance_weight": 0.1,
    "loss_chunk": 16,
    "attention": "blockwise",  # in the inputs' dtype throughout
    "dtype": jnp.float64,
    "param_dtype": jnp.float64,
}


def make_model(rngs: nnx.Rngs, **sizes: Any) -> Llama:
    model = Llama(LlamaConfig(**SIZES | sizes), rngs=rngs)
    # Most tokens prefer two of the experts.
    router = model.blocks.experts.router.kernel
    router.set_value(router.get_value().at[:, :, :2].multiply(40))
    return model


def batch(packed: bool, step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCABULARY, (16, TIME + 1))
    found: dict[str, Any] = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    found["weights"] = 1.0 * (rng.random((16, TIME)) > 0.2)
    if packed:
        segments = np.sort(rng.integers(0, 3, (16, TIME)), axis=1)
        first = np.array([[np.argmax(r == s) for s in r] for r in segments])
        found |= {"segments": segments, "positions": np.arange(TIME) - first}
    return found


def loss_fn(model: Any, batch: Any) -> Any:
    packed = {}
    if "segments" in batch:
        packed["segment_ids_BT"] = batch["segments"]
        packed["positions_BT"] = batch["positions"]
    return model.loss(batch["inputs"], batch["targets"], batch["weights"], **packed)


def transformation(optimizer: str) -> Any:
    tx = parity.TRANSFORMATIONS[optimizer]()
    # As jshard does: an optimizer that looks at whole tensors sees each layer alone.
    return tx if optimizer in parity.ELEMENTWISE else jshard.per_layer(tx)


@functools.cache
def plain(packed: bool, optimizer: str, balance: float) -> tuple[list[float], dict]:
    """Losses and final parameters without jshard's steps, on one device."""
    model = make_model(nnx.Rngs(jax.random.key(0)), balance_weight=balance)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = transformation(optimizer)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            return loss_fn(model, batch).compute()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state, losses = tx.init(params), []
    for number in range(STEPS):
        params, opt_state, value = step(params, opt_state, batch(packed, number))
        losses.append(float(value))
    return losses, parity.by_path(params)


def start(optimizer: str = "adamw", **options: Any) -> tuple:
    """(fsdp, state, train step); options are those of mesh, model and policy."""

    def of(*names: str) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    mesh = of("replica", "fsdp", "context", "tensor", "expert", "devices")
    sizes = of("expert_capacity", "balance_weight", "dtype", "param_dtype")
    policy = jshard.Policy(min_shard_elements=0, **options)
    fsdp = jshard.FSDP(jshard.make_mesh(**mesh), policy)
    tx = transformation(optimizer)
    state = fsdp.init(functools.partial(make_model, **sizes), tx)
    return fsdp, state, fsdp.train_step(loss_fn, tx)


UNEVEN = {"expert_capacity": 0.3}  # so that there are further rounds

# packed, optimizer, and options
CASES: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "fsdp": (True, "adamw", {"expert": 4, "remat": "full", **UNEVEN}),
    "all devices": (False, "sgd", {"expert": 8, "remat": "none"}),
    "replicas": (True, "adamw", {"replica": 2, "expert": 2, "remat": "dots"}),
    "copies": (False, "sgd", {"replica": 4, "fsdp": 1, "expert": 2}),
    "context": (True, "adamw", {"expert": 2, "context": 2, **UNEVEN}),
    "tensor": (False, "adamw", {"expert": 2, "tensor": 2}),
    "prefetch": (False, "adamw", {"expert": 4, "prefetch": True, **UNEVEN}),
    "groups": (False, "adamw", {"expert": 2, "reshard_after_forward": 2}),
    "unrolled": (False, "muon", {"replica": 2, "expert": 2, "unroll": True}),
    "names": (True, "adamw", {"expert": 4, "remat": jshard.Names("hidden")}),
    # The balance of a micro-batch is not that of the batch.
    "accumulate": (
        True,
        "adamw",
        {"expert": 4, "accumulate": 2, "balance_weight": 0.0, **UNEVEN},
    ),
    "deferred": (
        False,
        "adamw",
        {"expert": 2, "accumulate": 2, "defer_scatter": True, "balance_weight": 0.0},
    ),
}


@pytest.mark.quick("fsdp")
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_experts_train_as_whole_ones_on_one_device(case):
    packed, optimizer, options = case
    balance = options.get("balance_weight", SIZES["balance_weight"])
    losses, params = plain(packed, optimizer, balance)
    fsdp, state, train_step = start(optimizer, **options)
    found = []
    for number in range(STEPS):
        state, metrics = train_step(state, fsdp.shard_batch(batch(packed, number)))
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-9)
    assert parity.worst(parity.by_path(fsdp.unshard(state.params)), params) <= 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_tokens_move_and_experts_do_not():
    fsdp, state, train_step = start(expert=4, remat="full")
    sizes = dict(fsdp.mesh.shape)
    jaxpr = train_step.trace(state, fsdp.shard_batch(batch(False, 0))).jaxpr.jaxpr
    layers, tokens, width, hidden = 2, 2 * TIME, 16, 24
    exchanged = exchanged_bytes(tokens, 2, EXPERTS, width, 4, itemsize=8)
    found = traffic(jaxpr, sizes)
    assert found["all-to-all", "float64"].wire_bytes == layers * exchanged
    fsdp, state, whole_step = start(remat="full")
    jaxpr = whole_step.trace(state, fsdp.shard_batch(batch(False, 0))).jaxpr.jaxpr
    whole = traffic(jaxpr, dict(fsdp.mesh.shape))
    experts = 3 * EXPERTS * width * hidden
    assert sum(
        whole[kind, "float64"].wire_bytes - found[kind, "float64"].wire_bytes
        for kind in ("all-gather", "reduce-scatter")
    ) == layers * gathered_bytes(experts, 4, itemsize=8, reduce_itemsize=8)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_evaluation_and_predictions_are_those_without_the_axis():
    def results(**mesh):
        fsdp, state, _ = start(**mesh, **UNEVEN)
        examples = batch(True, 0)
        means = fsdp.eval_step(loss_fn)(state, fsdp.shard_batch(examples))
        predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
        inputs = fsdp.shard_examples({"inputs": examples["inputs"]})
        return means.compute()["loss"], fsdp.unshard(predict(state, inputs))

    for got, want in zip(results(expert=4), results(), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.slow
def test_checkpoints_go_from_any_mesh_to_any_other_bit_for_bit(tmp_path):
    narrow = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    fsdp, state, train_step = start(**narrow)
    state, _ = train_step(state, fsdp.shard_batch(batch(False, 0)))
    want = fsdp.unshard(state)
    meshes = [{"expert": 4}, {"replica": 2, "expert": 2}, {"expert": 8}, {}]
    for number, mesh in enumerate(meshes):
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(state)
        other, abstract, _ = start(**narrow, **mesh)
        with jshard.Checkpointer(tmp_path / str(number)) as checkpointer:
            state = checkpointer.restore(abstract)
        for pair in zip(
            *map(jax.tree.leaves, (other.unshard(state), want)), strict=True
        ):
            np.testing.assert_array_equal(*pair)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_axis_costs_no_memory_of_the_state():
    def bytes_a_device(**mesh):
        _, state, _ = start(**mesh)
        leaves = jax.tree.leaves((state.params, state.opt_state))
        return sum(x.addressable_shards[0].data.nbytes for x in leaves)

    assert bytes_a_device(expert=4) == bytes_a_device(fsdp=8)


@pytest.mark.usefixtures("x64")
def test_experts_that_the_axis_does_not_divide_are_refused_in_one_line():
    fsdp = jshard.FSDP(jshard.make_mesh(expert=8))
    model = functools.partial(make_model, num_experts=4)
    with pytest.raises(jshard.UserError, match=r"expert=8 does not divide .*experts"):
        fsdp.init(model, optax.sgd(0.1))


@pytest.mark.usefixtures("x64")
def test_models_without_experts_are_refused_in_one_line():
    fsdp = jshard.FSDP(jshard.make_mesh(expert=2))

    def model(rngs: nnx.Rngs) -> Llama:
        return Llama(LlamaConfig(**SIZES | {"num_experts": 0}), rngs=rngs)

    with pytest.raises(jshard.UserError, match="expert=2, but Llama declares nothing"):
        fsdp.init(model, optax.sgd(0.1))

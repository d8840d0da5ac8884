"""Parameters that the shards do not divide are sharded, and nobody sees the padding."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import hlo
import jshard
from checkpoints import read_parameters
from filled import filled
from jshard.sharding.layout.padding import padded_dim, padding_now
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.update.end_of_step import update
from jshard.storage.checkpoint import metadata
from jshard.storage.hub.parameters import find_parameters
from jshard.storage.hub.tensor_names import tensor_names

OPTIMIZER = optax.chain(optax.clip(1.0), optax.scale_by_lion(), optax.adamw(1e-2))
POLICY = jshard.Policy(min_shard_elements=0, ema_decay=0.9)
SCATTER = "reduce-scatter"
WIDTH, HIDDEN, VOCABULARY = 10, 7, 11


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = jshard.Unit(nnx.Embed(VOCABULARY, WIDTH, rngs=rngs))
        self.blocks = jshard.Stack(lambda rngs: Block(rngs=rngs), 3, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        assert self.head.kernel.shape == (WIDTH, VOCABULARY)
        return self.head(self.norm(self.blocks(self.embed(ids))))


def loss_fn(model: Model, ids: jax.Array) -> jshard.Mean:
    ce = optax.softmax_cross_entropy_with_integer_labels(model(ids), ids)
    return jshard.Mean(jnp.sum(ce), jnp.asarray(ce.size))


def fsdp_on(*mesh: int, policy: jshard.Policy = POLICY) -> jshard.FSDP:
    replica, shards = mesh
    devices = jax.devices()[: replica * shards]
    return jshard.FSDP(jshard.make_mesh(replica=replica, devices=devices), policy)


def trained_on_six(offload: str | None) -> jshard.TrainState:
    """A state that tests only read."""
    return trained(offload=offload)[0]


@functools.cache
def model() -> Model:
    return filled(lambda: Model(nnx.Rngs(0)))


@functools.cache
def trained(**knobs) -> tuple[jshard.TrainState, list[float], str]:
    """A state on six devices after some steps, their losses, and their program."""
    fsdp = fsdp_on(1, 6, policy=dataclasses.replace(POLICY, **knobs))
    state = fsdp.from_model(model(), OPTIMIZER)
    ids = fsdp.shard_batch(np.arange(72).reshape(-1, 4) % VOCABULARY)
    step = fsdp.train_step(loss_fn, OPTIMIZER).lower(state, ids).compile()
    losses = []
    for _ in range(5):
        state, metrics = step(state, ids)
        losses.append(float(metrics["loss"]))
    return state, losses, step.as_text()


def variables(tree) -> list[nnx.Variable]:
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    return [leaf for leaf in leaves if is_variable(leaf)]


@settings(max_examples=30)
@given(
    shape=st.lists(st.integers(0, 40), max_size=4),
    shards=st.integers(2, 9),
    data=st.data(),
)
def test_the_padded_dimension_adds_little_and_is_free(shape, shards, data):
    dims = range(-len(shape), 0)
    taken = data.draw(st.sets(st.sampled_from(dims)) if shape else st.just(set()))
    dim = padded_dim(tuple(shape), shards, tuple(taken), looked_up=False)
    free = {d: (-shape[d] % shards) / shape[d] for d in dims if shape[d]}
    free = {d: added for d, added in free.items() if d not in taken}
    if dim is None:
        assert not free
    else:
        assert free[dim] <= min(free.values()) + 1 / 32
        # None before it, which would be contiguous, is almost as good.
        assert all(free[d] > min(free.values()) + 1 / 32 for d in free if d < dim)


def test_every_parameter_is_sharded_whatever_its_width():
    fsdp = fsdp_on(1, 7)
    state = fsdp.abstract_state(Model, OPTIMIZER)
    layout = Layout.of(state, POLICY, fsdp.mesh)
    exact = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(exact, nnx.Param)))
    held = 0
    for path, variable in nnx.to_flat_state(state.params):
        assert layout.places[path].sharding.dim is not None
        value = variable.get_value()
        held += np.prod(value.sharding.shard_shape(value.shape))
    assert count / 7 < held < 1.4 * count / 7
    # The moments follow their parameters.
    for kind in ("mu", "nu"):
        found = optax.tree.get_all_with_path(state.opt_state, kind)
        assert found
        for _, moments in found:
            shapes = jax.tree.map(lambda x: (x.shape, x.sharding), moments)
            assert shapes == jax.tree.map(lambda x: (x.shape, x.sharding), state.params)


@pytest.mark.quick("None")
@pytest.mark.parametrize("offload", [None, "optimizer", "all"])
def test_padding_is_zero_after_every_step(offload):
    found = [v for v in variables(trained_on_six(offload)) if padding_now(v)]
    assert len(found) > 20  # parameters, moments and averages
    for variable in found:
        padding = padding_now(variable)
        assert padding is not None
        value = np.moveaxis(np.asarray(variable.get_value()), padding.dim, 0)
        exact = padding.shape[padding.dim]
        assert value[exact - 1].any() or value[:exact].any()
        assert not value[exact:].any()


@pytest.mark.slow  # test_variables.py has what models read
def test_models_and_fetched_values_are_exact():
    fsdp, state = fsdp_on(1, 6), trained_on_six(None)
    abstract = fsdp.abstract_state(Model, OPTIMIZER)
    want = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    for tree in (
        nnx.state(fsdp.model(state), nnx.Param),
        nnx.state(fsdp.model(abstract), nnx.Param),
        fsdp.fetch(state.params),
        fsdp.fetch(state.ema),
    ):
        shapes = jax.tree.map(lambda x: x.shape, tree)
        assert jax.tree.leaves(shapes) == jax.tree.leaves(
            jax.tree.map(lambda x: x.shape, want)
        )
    # What has been padded for one mesh starts a state on another.
    other = fsdp_on(1, 4).from_model(fsdp.model(state), optax.identity())
    for got, was in zip(
        jax.tree.leaves(fsdp.fetch(other.params)),
        jax.tree.leaves(fsdp.fetch(state.params)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, was)


@pytest.mark.core
def test_initial_values_do_not_depend_on_the_mesh():
    tx = optax.sgd(0.1)
    states = [fsdp_on(*mesh).init(Model, tx) for mesh in ((1, 1), (1, 7))]
    one, seven = (fsdp_on(1, 1).fetch(state.params) for state in states)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(seven), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow  # test_state_layout.py has the refusal alone
def test_a_state_for_another_mesh_is_refused_in_one_line():
    state = fsdp_on(1, 6).init(Model, OPTIMIZER)
    other = fsdp_on(1, 4)
    with pytest.raises(jshard.UserError, match=r"FSDP's mesh has cpu:0.* fsdp\.put"):
        other.train_step(loss_fn, OPTIMIZER)(state, np.zeros((8, 4), np.int32))


def test_checkpoints_restore_between_any_two_meshes_bit_for_bit(tmp_path: Path):
    """Padded or not, along whatever dimension; hypothesis above has more numbers."""
    meshes = [(1, 6), (2, 4), (1, 1)]
    fsdp, state = fsdp_on(*meshes[0]), trained_on_six(None)
    first = fsdp.fetch(state)
    for i, mesh in enumerate(meshes[1:]):
        with jshard.Checkpointer(tmp_path / str(i)) as checkpointer:
            checkpointer.save(state)
        fsdp = fsdp_on(*mesh)
        abstract = fsdp.abstract_state(Model, OPTIMIZER)
        with jshard.Checkpointer(tmp_path / str(i)) as checkpointer:
            state = checkpointer.restore(abstract)
        for x, like in zip(
            jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True
        ):
            assert (x.shape, x.sharding) == (like.shape, like.sharding)
        for got, want in zip(
            jax.tree.leaves(fsdp.fetch(state)), jax.tree.leaves(first), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        for variable in variables(state):
            if padding := padding_now(variable):
                value = np.asarray(variable.get_value())
                value = np.moveaxis(value, padding.dim, 0)
                assert not value[padding.shape[padding.dim] :].any()


def test_padding_costs_no_collective_but_its_own_bytes():
    """Slices for the model and the optimizer, and what follows them, stay local."""
    state, _, program = trained(offload=None)
    found: Counter = Counter()
    for c in hlo.collectives(program):
        if not hlo.is_number(c.operands[0]) or len(c.operands) > 1:
            found[c.kind, sum(x.size for x in c.operands)] += c.times
    sizes = Counter(
        x.size if path[0] != "blocks" else x.size // 3
        for path, variable in nnx.to_flat_state(state.params)
        for x in [variable.get_value()]
        for _ in range(3 if path[0] == "blocks" else 1)
    )
    scattered = {n: times for (kind, n), times in found.items() if kind == SCATTER}
    assert scattered == sizes
    # Layers are gathered again for their backward, but for a bias that is added last.
    again = Counter({12: 3, 84: 6})
    gathered = {n * 6: t for (kind, n), t in found.items() if kind == "all-gather"}
    assert gathered == sizes + again
    others = {k: t for k, t in found.items() if k[0] not in (SCATTER, "all-gather")}
    # Sums of batch norm, forward and backward; and of metrics.
    assert others == {("all-reduce", 2 * WIDTH): 2, ("all-reduce", 9): 1}


def test_whole_matrix_optimizers_move_padded_layers_and_gather_none():
    class Squares(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            layer = lambda rngs: nnx.Linear(50, 50, use_bias=False, rngs=rngs)
            self.blocks = jshard.Stack(layer, 7, rngs=rngs)

    fsdp = fsdp_on(1, 6, policy=jshard.Policy(min_shard_elements=0))
    tx = jshard.optim.muon(1e-2)
    state = fsdp.abstract_state(Squares, tx)
    given = state.params, jnp.float32(0), jnp.int32(1), None
    run = jax.jit(lambda *args: update(fsdp.mesh, fsdp.policy, tx, *args))
    lowered = run.lower((state.params, state.opt_state, None), given)
    found = hlo.collectives(lowered.compile().as_text() or "")
    large = [c for c in found if sum(x.size for x in c.operands) > 50]
    assert {c.kind for c in large} == {"all-to-all"}
    assert {sum(x.size for x in c.operands) for c in large} == {54 * 50}


@pytest.mark.slow  # test_rounded_weights.py has any number of devices
@pytest.mark.parametrize(
    "precision",
    [
        {"gather": "int8", "reduce": "bfloat16", "sum": "float32"},
        {"gather": "float8_e4m3fn", "compute": "bfloat16", "reduce": "bfloat16"},
        {"gather": "bfloat16", "reduce": "bfloat16"},
    ],
    ids=lambda precision: precision["gather"],
)
def test_narrow_gathers_and_scatters_of_padded_shards(precision):
    _, exact, _ = trained(offload=None)
    _, narrow, _ = trained(
        ema_decay=None,
        reshard_after_forward=2,
        precision=jshard.Precision(**precision),
    )
    np.testing.assert_allclose(narrow, exact, rtol=2e-2)
    assert exact[-1] < 0.9 * exact[0]


@pytest.mark.slow  # test_peft_files.py reads onto three devices
def test_safetensors_are_read_onto_padded_shards(tmp_path: Path):
    one, six = fsdp_on(1, 1), fsdp_on(1, 6)
    make = lambda: Model(nnx.Rngs(0))
    state = one.from_model(model(), OPTIMIZER)
    arrays = metadata.arrays_by_name(state)
    names = tensor_names(metadata.describe(state, config={}, metrics={}))
    tensors = {
        name: np.ascontiguousarray(np.asarray(arrays[stored])[index])
        for stored, layers in names.items()
        for index, name in layers.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    new = six.from_model(filled(make, spread=0.1), OPTIMIZER)
    read = read_parameters(find_parameters(tmp_path, new), new)
    for got, want in zip(
        jax.tree.leaves(six.fetch((read.params, read.ema))),
        jax.tree.leaves(one.fetch((state.params, state.params))),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    for variable in filter(padding_now, variables(read.params)):
        padding = padding_now(variable)
        assert padding is not None
        value = np.moveaxis(np.asarray(variable.get_value()), padding.dim, 0)
        assert not value[padding.shape[padding.dim] :].any()


@pytest.mark.slow  # by default, test_four_bit.py's adapters train on three devices
def test_adapters_of_any_rank_train_beside_padded_weights():
    class Small(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.block = jshard.Stack(lambda rngs: Block(rngs=rngs), 1, rngs=rngs)
            jshard.nn.add_lora(self, rank=3, alpha=3.0, rngs=rngs)

    def squares(model: Small, x: jax.Array) -> jshard.Mean:
        return jshard.Mean(jnp.sum((model.block(x) - 1) ** 2), jnp.asarray(x.size))

    losses, model, tx = [], filled(lambda: Small(nnx.Rngs(0))), optax.sgd(0.1)
    x = np.random.default_rng(0).normal(size=(12, WIDTH)).astype(np.float32)
    for mesh in ((1, 1), (1, 6)):
        fsdp = fsdp_on(*mesh, policy=jshard.Policy(min_shard_elements=0))
        state = fsdp.from_model(model, tx, wrt=nnx.LoRAParam)
        step, found = fsdp.train_step(squares, tx), []
        for _ in range(3):
            state, metrics = step(state, fsdp.shard_batch(x))
            found.append(float(metrics["loss"]))
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][2] < losses[0][0]


def test_a_warning_names_what_is_whole_if_it_is_much():
    class Large(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.blocks = jshard.Stack(
                lambda rngs: nnx.Linear(1024, 1024, rngs=rngs), 2, rngs=rngs
            )

    def init(fewest: int) -> None:
        policy = jshard.Policy(min_shard_elements=fewest)
        fsdp_on(1, 8, policy=policy).abstract_state(Large, OPTIMIZER)

    init(4096)
    said = r"100% .* replicated on every device, .* blocks.kernel.*"
    said += "min_shard_elements=2097152"
    with pytest.warns(UserWarning, match=said):
        init(1 << 21)

"""Sequences split over devices: `make_mesh(context=)`.

The reference is the model as an ordinary Flax module, on one device, with JAX and optax
alone, in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
from split_models import TIME, batch, exchanged, start, trains_alike

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
    "deepseek": ("deepseek", True, "adamw", {"context": 4, "accumulate": 2}),
    "glm": ("glm", False, "adamw", {"replica": 2, "context": 2}),
    "muon": ("gpt", False, "muon", {"replica": 2, "context": 2, "unroll": True}),
    "one document a row": ("llama", False, "sgd", {"fsdp": 1, "context": 2}),
    "deferred": (
        "llama",
        False,
        "adamw",
        {"context": 2, "accumulate": 2, "defer_scatter": True},
    ),
}


@pytest.mark.filterwarnings("ignore:attention. context=. does not divide")
@pytest.mark.slow  # test_experts_and_padding.py and test_each_axis.py split some
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_sequences_train_as_whole_ones_on_one_device(case):
    trains_alike(*case)


@pytest.mark.slow  # test_dropout_masks.py has every mesh
@pytest.mark.usefixtures("x64")
def test_dropout_drops_the_same_values_of_split_sequences():
    def masks(**mesh):
        fsdp = jshard.FSDP(jshard.make_mesh(**mesh), sequences=("ones", "bits"))

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
        model = Drops(nnx.Rngs(0))
        state, step = fsdp.from_model(model, tx), fsdp.train_step(loss_fn, tx)
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
    assert masks(context=2, replica=2) == whole


@pytest.mark.usefixtures("x64")
def test_attention_exchanges_heads_four_times_a_layer_and_pass():
    found = exchanged("llama", context=2, remat="none")["all-to-all", "float64"]
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
    want = fsdp.fetch(state)
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
        jax.tree.map(np.testing.assert_array_equal, other.fetch(state), want)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_predictions_have_whole_sequences():
    def logits(**mesh):
        fsdp, state, _ = start("gpt", **mesh)
        predict = fsdp.predict_step(lambda model, batch: model(batch["inputs"]))
        examples = fsdp.shard_examples({"inputs": batch(False, 0)["inputs"]})
        return fsdp.fetch(predict(state, examples))

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
            r"'inputs' .8, 23. has a length that is not divisible by the mesh's .*=4",
        ),
        ((3, 24), "3 examples is not divisible by 2 groups of context=4 devices"),
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
        return jshard.functional.gather(shards, PartitionSpec("fsdp"))

    mapped = jax.shard_map(
        gathers,
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(jshard.UserError, match=r"name .*'fsdp', 'context'.* in place"):
        mapped(np.zeros(8, np.float32))

"""Which dimension of a parameter is sharded, from its shape and the mesh alone."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import jshard
from jshard.sharding.layout import layer_dims as layers
from jshard.sharding.layout.padding import Padding, padded_dim
from jshard.sharding.layout.placement import Part, Placement, Sharding
from jshard.sharding.layout.specs import (
    LOOKED_UP,
    follow,
    is_annotated,
    is_sharded,
    is_table,
    manual_specs,
    mark_table,
    param_spec,
    shard_dim,
    sharded_dim,
    sharded_over,
)
from jshard.sharding.layout.splits import WHOLE, Parts

P = PartitionSpec


def mesh_of(**sizes: int) -> Any:
    sizes = {"replica": 1} | sizes
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def param(*shape: int, **metadata: Any) -> Any:
    value = jax.ShapeDtypeStruct(shape, jnp.float32)
    return nnx.Param(value, eager_sharding=False, **metadata)


def find(variable: nnx.Variable, mesh, parts: Parts = WHOLE, fewest: int = 0):
    policy = jshard.Policy(min_shard_elements=fewest)
    return sharded_dim(variable, policy, mesh, parts)


@pytest.mark.parametrize(
    ("shape", "knobs", "dim"),
    [
        ((8, 8), {}, -2),  # the first is contiguous
        ((8, 8), {"looked_up": True}, -1),
        ((6, 8), {}, -1),
        ((6, 8, 3), {}, -2),
        ((6, 7), {}, None),
        ((0, 8), {}, -1),
        ((0,), {}, None),
        ((), {}, None),
        ((8, 6), {"layer_dims": 1}, None),
        ((8, 8), {"layer_dims": 1}, -1),
        ((8, 8), {"taken": ("model",)}, -1),
        ((8, 8), {"taken": (None, "model")}, -2),
        ((8, 8), {"taken": ("model", "model")}, None),
        ((8, 8), {"parts": {-2: 2}}, -1),  # of a part of 4
        ((16, 8), {"parts": {-2: 2}}, -2),
        ((8, 8), {"parts": {-1: 2}}, -2),
    ],
    ids=str,
)
def test_the_first_free_dimension_that_divides_is_sharded(shape, knobs, dim):
    assert shard_dim(shape, 8, **knobs) == dim


@pytest.mark.parametrize("shape", [(8, 3), (9, 5)], ids=["divisible", "padded"])
def test_a_parameter_of_the_fewest_elements_is_sharded_and_one_less_is_not(shape):
    """In each layer: how many there are does not count."""
    mesh, size = mesh_of(fsdp=8), int(np.prod(shape))
    assert shard_dim((8,), 8, min_elements=8) == -1
    assert shard_dim((8,), 8, min_elements=9) is None
    assert shard_dim((7, 8), 8, min_elements=9, layer_dims=1) is None
    for variable in (param(*shape), param(7, *shape, in_layer=(("kernel",),))):
        dim, padding = find(variable, mesh, fewest=size)
        assert dim is not None
        assert (padding is not None) == (shape == (9, 5))
        assert find(variable, mesh, fewest=size + 1) == (None, None)


def test_the_first_dimension_is_padded_where_another_saves_almost_nothing():
    assert padded_dim((127, 1023), 8) == -2  # one of 127 in place of one of 1023
    assert padded_dim((96, 9), 9) == -2  # 1/32 more: as much as contiguity is worth
    assert padded_dim((95, 7), 7) == -1  # 3/95 is more
    assert padded_dim((9, 1023), 8) == -1
    assert padded_dim((1023, 9), 8) == -2


def test_what_other_axes_split_or_nothing_has_is_not_padded():
    assert padded_dim((9, 10), 8, (-2,)) == -1
    assert padded_dim((9, 10), 8, (-1,)) == -2
    assert padded_dim((9, 10), 8, (-1, -2)) is None
    assert padded_dim((1023, 9), 8, looked_up=True) == -1
    assert padded_dim((0, 9), 8) == -1
    assert padded_dim((), 8) is None


@pytest.mark.core
def test_padding_ends_at_the_next_multiple_of_the_shards():
    assert find(param(3, 1), mesh_of(replica=2, fsdp=4)) == (
        -2,
        Padding((3, 1), -2, 4, ("fsdp",)),
    )
    assert find(param(9), mesh_of(fsdp=2, context=2)) == (
        -1,
        Padding((9,), -1, 12, ("fsdp", "context")),
    )
    assert find(param(0), mesh_of(fsdp=2)) == (None, None)
    assert find(param(), mesh_of(fsdp=2)) == (None, None)


def test_a_table_is_padded_along_its_columns():
    table = param(1023, 9, **{LOOKED_UP: True})
    assert find(table, mesh_of(fsdp=8))[0] == -1
    assert find(param(8, 8, **{LOOKED_UP: True}), mesh_of(fsdp=8)) == (-1, None)


def test_what_tensor_splits_is_sharded_over_the_other_axes():
    mesh = mesh_of(replica=2, fsdp=2, tensor=4)
    columns = Parts(((-1, "tensor"),))
    assert sharded_over(WHOLE, mesh) is None
    assert sharded_over(columns, mesh) == ("fsdp",)
    # Eight shards of a whole parameter, two of each of the four parts.
    assert find(param(6, 8), mesh)[0] == -1
    assert find(param(6, 8), mesh, columns) == (-2, None)
    assert find(param(7, 8), mesh, columns) == (-1, None)
    padded = Padding((7, 4), -2, 8, ("fsdp",))  # the other is taken
    assert find(param(7, 4), mesh, columns) == (-2, padded)


def test_a_vocabulary_is_padded_for_parts_and_shards_together():
    mesh, columns = mesh_of(fsdp=2, tensor=2), Parts(((-1, "tensor"),))
    padding = Padding((4, 9), -1, 12, ("tensor", "fsdp"))
    assert find(param(4, 9), mesh, columns, fewest=36) == (-1, padding)
    assert find(param(4, 9), mesh, columns, fewest=37) == (None, padding)
    # The last of four devices has one of ten values, or none of nine.
    mesh = mesh_of(fsdp=1, tensor=4)
    assert find(param(10), mesh, columns)[1] == Padding(
        (10,), -1, 12, ("tensor", "fsdp")
    )
    with pytest.raises(jshard.UserError, match="tensor=4 splits a vocabulary of 9, "):
        find(param(9), mesh, columns)


def test_annotated_dimensions_keep_their_axes():
    mesh = mesh_of(fsdp=2, model=2)
    variable = param(8, 8, out_sharding=("model", None))
    assert is_annotated(variable)
    assert not is_annotated(param(8))
    assert find(variable, mesh) == (-1, None)
    assert param_spec(variable, Placement(Sharding(-1)), mesh) == P("model", "fsdp")
    assert param_spec(variable, Placement(Sharding(None)), mesh) == P("model")
    # Padding takes what is free; axes of jshard's own, or of no mesh, take nothing.
    assert find(param(9, 9, out_sharding=("model", None)), mesh)[0] == -1
    for axis in ("fsdp", "other"):
        assert find(param(8, 8, out_sharding=(axis, None)), mesh) == (-2, None)
    both = param(8, 8, 8, out_sharding=(None, ("model", "other"), None))
    assert param_spec(both, Placement(Sharding(-3)), mesh) == P("fsdp", ("model",))


def test_a_spec_names_each_dimension_up_to_the_last_that_is_split():
    mesh = mesh_of(replica=2, fsdp=2)
    layered = param(3, 4, 4, in_layer=(("kernel",),))
    assert param_spec(param(4, 4), Placement(Sharding(-2)), mesh) == P("fsdp")
    assert param_spec(param(4, 4), Placement(Sharding(-1)), mesh) == P(None, "fsdp")
    assert param_spec(layered, Placement(Sharding(-2)), mesh) == P(None, "fsdp")
    assert param_spec(param(4, 4), Placement(Sharding(None)), mesh) == P()
    tensor = mesh_of(fsdp=2, tensor=2)
    shards = P(("fsdp", "tensor"))
    assert param_spec(param(4), Placement(Sharding(-1)), tensor) == shards
    split = Placement(Sharding(-2, over=("fsdp",)), part=Part(splits=((-1, "tensor"),)))
    assert param_spec(param(4, 4), split, tensor) == P("fsdp", "tensor")
    # A shard of a device's part, along the same dimension.
    same = Placement(Sharding(-1, over=("fsdp",)), part=Part(splits=((-1, "tensor"),)))
    assert param_spec(param(4, 4), same, tensor) == P(None, ("tensor", "fsdp"))
    whole = Placement(
        Sharding(None, over=("fsdp",)), part=Part(splits=((-2, "tensor"),))
    )
    assert param_spec(param(4, 4), whole, tensor) == P("tensor")
    annotated = param(3, 4, 4, in_layer=(("kernel",),), out_sharding=("model",))
    automatic = mesh_of(fsdp=2, model=2)
    spec = param_spec(annotated, Placement(Sharding(-1)), automatic)
    assert spec == P(None, "model", "fsdp")


def test_specs_are_reduced_to_the_axes_of_a_step():
    mesh = mesh_of(fsdp=2, model=2)
    specs = [P("model", "fsdp"), P(("fsdp", "model")), P(None, ("replica", "fsdp"))]
    assert manual_specs(specs, mesh) == [
        P(None, "fsdp"),
        P(None),
        P(None, ("replica", "fsdp")),
    ]
    assert is_sharded(P(None, ("fsdp", "tensor")))
    assert not is_sharded(P(None, "tensor"))


def test_an_array_follows_the_parameter_of_its_path_and_shape():
    params = {"a": {"w": np.zeros((2, 3))}, "w": np.zeros(3)}
    key = jax.tree_util.DictKey
    find = follow(params, ["inner", "outer"])
    assert find((key("mu"), key("a"), key("w")), np.zeros((2, 3))) == "inner"
    assert find((key("mu"), key("w")), np.zeros(3)) == "outer"
    assert find((key("a"), key("w")), np.zeros((2, 3))) == "inner"
    # The longest path counts, and after it those of the same shape.
    assert find((key("mu"), key("a"), key("w")), np.zeros(3)) == "outer"
    assert find((key("mu"), key("a"), key("w")), np.zeros(2)) is None
    assert find((key("count"),), np.zeros(())) is None
    assert find((), np.zeros(3)) is None
    again = {"a": {"w": np.zeros(3)}, "w": np.zeros(3)}
    find = follow(again, ["inner", "outer"])
    assert find((key("mu"), key("a"), key("w")), np.zeros(3)) == "inner"


def test_only_an_embedding_itself_is_marked_as_a_table():
    class Other(nnx.Embed):
        pass

    for module, marked in (
        (nnx.Embed(4, 2, rngs=nnx.Rngs(0)), True),
        (Other(4, 2, rngs=nnx.Rngs(0)), False),
        (jshard.Unit(nnx.Embed(4, 2, rngs=nnx.Rngs(0))), True),
    ):
        mark_table(module)
        assert is_table(module) == marked
        assert module.embedding.get_metadata(LOOKED_UP, False) == marked
    mark_table(SimpleNamespace())  # which has no table


def test_marks_of_layers_count_and_name_the_outermost_stack():
    variable = param(2, 3, 8)
    assert layers.layer_dims(variable) == 0
    assert layers.stack_of(("a", "w"), variable) is None
    layers.mark_layers(variable, inner=[("w",)])
    layers.mark_layers(variable, outer=[("inner", "w")], inner=[])
    assert variable.get_metadata(layers.IN_LAYER) == (("inner", "w"), ("w",))
    assert layers.layer_dims(variable) == 2
    assert layers.stack_of(("blocks", "inner", "w"), variable) == ("blocks",)
    assert layers.stack_of(("alias",), variable) == ("alias",)
    one = layers.without_layers(variable)
    assert layers.layer_dims(one) == 1
    assert layers.stack_of(("blocks", 0, "w"), one) == ("blocks", "0")
    assert layers.layer_dims(layers.without_layers(layers.without_layers(one))) == 0
    assert layers.layer_dims(variable) == 2

"""What an export writes: names of each layer there and back, and its bytes."""

from typing import Any

import pytest

from jshard.storage.hub.exported_tensors import Exported, sizes
from jshard.storage.hub.file_tensor import FileTensor
from jshard.storage.hub.tensor_names import tensor_names
from jshard.system.errors import UserError


def array(dtype: str, *shape: int, layer_dims: int = 0) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "random": False, "layer_dims": layer_dims}


ARRAYS = {
    "params.embed.embedding": array("float32", 10, 4),
    "params.blocks.up.kernel": array("float32", 3, 4, 6, layer_dims=1),
    "params.blocks.norm.scale": array("bfloat16", 3, 4, layer_dims=1),
    "frozen.codes": array("int8", 5),
}
ABOUT = {"arrays": ARRAYS, "stacks": ["blocks"], "config": {}}


@pytest.mark.parametrize(
    ("dtype", "embed", "norm"),
    [(None, 4, 2), ("float32", 4, 4), ("bfloat16", 2, 2)],
)
def test_bytes_are_those_of_the_dtype_that_is_written(dtype, embed, norm):
    found = sizes(Exported(ABOUT, dtype).tensors())
    layers = {f"blocks.{i}.up.kernel": 4 * 6 * embed for i in range(3)}
    layers |= {f"blocks.{i}.norm.scale": 4 * norm for i in range(3)}
    # Of numbers that are not floating-point the dtype stays.
    assert found == {"embed.embedding": 40 * embed, "codes": 5} | layers


@pytest.mark.core
def test_each_layer_has_a_name_of_its_own_there_and_back():
    names = tensor_names(ABOUT)
    assert names["params.blocks.up.kernel"] == {
        (i,): f"blocks.{i}.up.kernel" for i in range(3)
    }
    places = {
        name: FileTensor((f"model.{name}.weight",), transposed="kernel" in name)
        for layers in names.values()
        for name in layers.values()
    }
    written = Exported(ABOUT).tensors(places)
    back = {place.names[0]: name for name, place in places.items()}
    found = {}
    for tensor in written.values():
        found.setdefault(tensor.source, {})[tensor.layer] = back[tensor.name]
    assert found == names
    assert len(written) == 8


def test_experts_and_parts_share_the_bytes_of_their_array():
    arrays = {"params.up.kernel": array("float32", 2, 4, 6)}
    about = {**ABOUT, "arrays": arrays}
    experts = {"up.kernel": FileTensor(("e.0", "e.1"))}
    written = Exported(about, "bfloat16").tensors(experts)
    assert sizes(written) == {"e.0": 48, "e.1": 48}
    assert [x.layer for x in written.values()] == [(0,), (1,)]
    arrays = {f"params.{x}": array("float32", 4, 6) for x in "qkv"}
    parts = {x: FileTensor(("qkv",), part=(i, 3)) for i, x in enumerate("qkv")}
    written = Exported({**ABOUT, "arrays": arrays}).tensors(parts)
    assert sizes(written) == {"qkv": 3 * 4 * 6 * 4}
    assert len(written) == 3


def test_what_the_files_have_no_place_for_is_a_users_error():
    with pytest.raises(UserError, match=r"the recipe's map lacks embed\.embedding"):
        Exported(ABOUT).tensors({})
    with pytest.raises(UserError, match="the checkpoint has no averages"):
        Exported(ABOUT, ema=True).tensors()

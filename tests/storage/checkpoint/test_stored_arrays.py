"""The arrays of a step: how they are written, compared, and read some at a time."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jshard.storage.checkpoint import frozen, stored_arrays
from jshard.storage.checkpoint.metadata import check_wanted
from jshard.system.errors import UserError


def wanted(**dtypes: str) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct((2,), dtype) for name, dtype in dtypes.items()}


def stored(**dtypes: str) -> dict[str, Any]:
    return {name: {"shape": [2], "dtype": dtype} for name, dtype in dtypes.items()}


def test_what_is_stored_in_another_precision_is_told_once_a_kind():
    found = stored(a="float32", b="float32", c="bfloat16", d="int32")
    with pytest.warns(UserWarning, match="are read as") as told:
        check_wanted(
            Path("x"), wanted(a="bfloat16", b="bfloat16", c="float32", d="int32"), found
        )
    assert [str(warning.message) for warning in told] == [
        "2 arrays of checkpoint x are read as bfloat16, saved as float32",
        "1 arrays of checkpoint x are read as float32, saved as bfloat16",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_wanted(Path("x"), wanted(a="float32"), stored(a="float32"))


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        ({"a": "int32"}, {"a": "float32"}, "a has dtype int32, not float32"),
        ({"a": "float32"}, {"a": "int32"}, "a has dtype float32, not int32"),
        ({}, {"a": "int32"}, "it lacks a"),
        ({"a": "int32"}, {}, "it has unexpected a"),
    ],
)
def test_another_kind_of_numbers_is_refused(there, here, said):
    with pytest.raises(UserError, match=f"of another model or optimizer: {said}$"):
        check_wanted(Path("x"), wanted(**here), stored(**there))


def test_arrays_are_stored_as_they_are_read():
    context = stored_arrays._saving_context({})
    saving = context.array.saving
    assert saving.use_compression is False
    assert saving.ocdbt_target_data_file_size == 256 * 2**20
    assert saving.min_slice_bytes_for_replica_parallel == 2**20
    assert context.asynchronous.create_directories_asynchronously is False


@pytest.mark.parametrize(
    ("limit", "layers", "divided"),
    [(32, 0, False), (31, 0, True), (31, 1, True), (10**6, 1, False)],
)
def test_shards_above_a_chunk_are_divided_and_stacks_by_layers(
    limit, layers, divided, monkeypatch
):
    monkeypatch.setattr(stored_arrays, "_CHUNK", limit)
    context = stored_arrays._saving_context({"a.w": {"layer_dims": layers}})
    bounded: Any = context.array.saving.scoped_storage_options_creator
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    array = jax.device_put(np.zeros((4, 16), np.float32), sharding)
    path = tuple(map(jax.tree_util.DictKey, ("a", "w")))
    options = bounded(path, array)
    assert (options is not None) == divided
    if options is not None:
        assert options.chunk_byte_size == limit
        assert options.shard_axes == ((0,) if layers else None)
    assert bounded(path, jnp.float32(3)) is None


@pytest.fixture
def database(tmp_path) -> dict[str, Any]:
    """Arrays of a database: `a` to `e`, and their values."""
    base = {"driver": "ocdbt", "base": f"file://{tmp_path}/"}
    for number, name in enumerate("abcde"):
        store = tensorstore.open(
            {"driver": "zarr3", "kvstore": base | {"path": f"{name}/"}},
            create=True, dtype="float32", shape=[6, 4],
        ).result()  # fmt: skip
        store.write(np.full((6, 4), number + 1, np.float32)).result()
    return base | {"context": {}}


def shaped(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    """Rows in eight parts, or whole ones where there are not eight."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None if shape[0] % 8 else "fsdp")
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))


@pytest.mark.parametrize("at_once", [0, 95, 96, 200, 10**9])
def test_few_bytes_are_read_at_a_time_and_all_in_the_end(
    at_once, database, monkeypatch
):
    started, most = [], []
    read, on_devices = stored_arrays._read, stored_arrays._on_devices
    monkeypatch.setattr(
        stored_arrays, "_read", lambda *args: (started.append(1), read(*args))[1]
    )

    def made(*args):
        most.append(len(started) - len(most))
        return on_devices(*args)

    monkeypatch.setattr(stored_arrays, "_on_devices", made)
    names = [*"ebacd"]
    loaded = stored_arrays._load(database, dict.fromkeys(names, shaped(6, 4)), at_once)
    assert [*loaded] == names
    for name, array in loaded.items():
        assert (np.asarray(array) == "abcde".index(name) + 1).all()
    # One is always in progress beside what is taken; each has 96 bytes.
    assert max(most) == {0: 2, 95: 2, 96: 2, 200: 3, 10**9: 5}[at_once]


def test_padding_is_zeros_and_may_be_less(database):
    for rows, columns in ((8, 4), (16, 9), (8, 2)):
        like = shaped(rows, columns, dtype="bfloat16")
        array = stored_arrays._load({**database, "context": {}}, {"c": like}, 1)["c"]
        full = np.zeros((rows, columns))
        full[:6, :4] = 3
        assert (array.dtype, array.sharding) == (like.dtype, like.sharding)
        np.testing.assert_array_equal(np.asarray(array, np.float32), full)


def test_frozen_parameters_are_known_by_the_sum_of_their_bits(monkeypatch, tmp_path):
    arrays: dict[str, Any] = {
        "frozen.w": jnp.asarray([1.0, -2.0], jnp.bfloat16),
        "frozen.q": jnp.asarray([3, 250], jnp.uint8),
        "params.w": jnp.ones(2),
    }
    monkeypatch.setattr(frozen.metadata, "arrays_by_name", lambda state: arrays)
    state: Any = type("State", (), {"step": jnp.int32(0)})()
    halves, words = np.array([1 + 2j, 3 - 1j], np.complex64), np.array([5, 7])
    few: Any = np.array([1, -3]), [True, False, True]
    of_others = {
        "frozen.complex": jnp.asarray(halves),
        "frozen.bool": jnp.asarray(few[1]),
        "frozen.int4": jnp.asarray(few[0], jnp.int4),
        "frozen.key": jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32)),
    }
    own = dict(arrays)
    arrays |= of_others
    in_words = lambda x: int(x.view(np.uint16).astype(np.uint32).sum())
    assert frozen.bit_sums(state) == frozen.bit_sums(state) | {
        "frozen.complex": f"complex64 {in_words(halves)}",
        "frozen.bool": "bool 2",
        "frozen.int4": f"int4 {in_words(few[0].astype(np.float32))}",
        "frozen.key": "key<fry> 12",
    }
    arrays.clear()
    arrays |= own
    sums = frozen.bit_sums(state)
    bits = int(np.asarray(arrays["frozen.w"]).view(np.uint16).astype(np.uint32).sum())
    assert sums == {"frozen.w": f"bfloat16 {bits}", "frozen.q": "uint8 253"}

    def about(**then: str) -> dict[str, Any]:
        named = {f"frozen.{name}": text for name, text in then.items()}
        return {frozen.KEY: {"path": "/base", "bit_sums": named}}

    for fine in (
        about(w=f"bfloat16 {bits}", q="uint8 253"),
        about(w="float32 7"),  # kept in another dtype then
        about(other="bfloat16 9"),
        about(),
    ):
        frozen.check_unchanged(tmp_path, fine, state)
    with pytest.raises(UserError, match=r"those of /base: frozen\.q differ; give"):
        frozen.check_unchanged(
            tmp_path, about(w=f"bfloat16 {bits}", q="uint8 254"), state
        )


def test_what_is_left_out_is_the_frozen_parameters():
    content = {"step": 3, "arrays": {"frozen.w": 1, "params.frozen.w": 2}}
    assert frozen.left_out(content, "/base", {"frozen.w": "x 1"}) == {
        "step": 3,
        "arrays": {"params.frozen.w": 2},
        "frozen_from": {"path": "/base", "bit_sums": {"frozen.w": "x 1"}},
    }


def test_metadata_that_is_no_arrays_is_one_line(tmp_path):
    folder = tmp_path / stored_arrays.ARRAYS / "process_0"
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}
    written = {"a": b'{"zarr_format": 3, "shape": [-1]}', "b": b"[[[", "c": b"{}"}
    opened = tensorstore.KvStore.open(store).result()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    array = jax.ShapeDtypeStruct((2,), "float32", sharding=one)
    for name, content in written.items():
        opened.write(f"{name}/zarr.json", content).result()
        with pytest.raises(UserError, match=r"^checkpoint \S+ is damaged: ") as error:
            stored_arrays.load(tmp_path, {name: array})
        assert "\n" not in str(error.value)

"""Arrays in buckets: how they are cut, by whom written, and who verifies what."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jshard.storage.checkpoint import manifest, stored_arrays
from jshard.storage.checkpoint.buckets import arrays
from jshard.system.errors import UserError


def sharded(values: np.ndarray) -> jax.Array:
    """An array in eight parts of its first dimension."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(values, jax.NamedSharding(mesh, jax.P("fsdp")))


@pytest.mark.parametrize(
    ("number", "factor"), [(2, 2), (3, 3), (4, 2), (9, 3), (25, 5), (35, 5), (7, 7)]
)
def test_a_chunk_is_divided_by_its_smallest_factor(number, factor):
    assert arrays._smallest_factor(number) == factor


@pytest.mark.parametrize(
    ("limit", "chunk"),
    [(10**6, [3, 10]), (120, [3, 10]), (119, [1, 10]), (40, [1, 10]), (39, [1, 5]),
     (19, [1, 1]), (1, [1, 1])],
)  # fmt: skip
def test_shards_are_cut_into_chunks_by_their_bytes(limit, chunk, monkeypatch):
    monkeypatch.setattr(arrays, "_CHUNK", limit)
    described = arrays._zarr(sharded(np.zeros((24, 10), np.float32)))
    assert described["chunk_grid"]["configuration"]["chunk_shape"] == chunk
    assert (described["shape"], described["data_type"]) == ([24, 10], "float32")
    assert [codec["name"] for codec in described["codecs"]] == ["bytes", "crc32c"]


def test_arrays_are_written_in_groups_of_about_as_many_bytes(monkeypatch):
    monkeypatch.setattr(arrays, "_AT_ONCE", 8)

    def groups(*sizes: int) -> list[str]:
        shards: Any = {
            f"{i}": ({}, [(None, np.zeros(size, np.int8))])
            for i, size in enumerate(sizes)
        }
        return ["".join(group) for group in arrays._groups(shards)]

    assert groups(4, 4, 4) == ["01", "2"]
    assert groups(7, 1, 8) == ["01", "2"]
    assert groups(4, 3, 9, 1) == ["012", "3"]
    assert groups(8) == ["0"]
    assert groups() == []


def test_replicas_are_written_once_and_keys_as_their_numbers():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    plain = jax.NamedSharding(mesh, jax.P())
    found = arrays.on_host(
        {
            "w": sharded(np.arange(16.0, dtype=np.float32)),
            "n": jax.device_put(jnp.arange(3), plain),
            "key": jax.device_put(jax.random.key(5), plain),
        }
    )
    assert [len(own) for _, own in found.values()] == [8, 1, 1]
    assert [x.tolist() for _, x in found["w"][1]][:2] == [[0.0, 1.0], [2.0, 3.0]]
    assert found["key"][1][0][1].tolist() == [0, 5]


def test_two_processes_write_a_database_each_and_the_first_merges_them(there, tmp_path):
    values = np.arange(16.0, dtype=np.float32)
    shards = arrays.on_host({"w": sharded(values), "n": jnp.arange(300)})
    described, own = shards["w"]
    first = {"w": (described, own[:4]), "n": shards["n"]}
    second = {"w": (described, own[4:]), "n": (shards["n"][0], [])}
    for process, part in enumerate((first, second)):
        arrays.write(there, part, process, 2)
    assert arrays.merged_objects(there, 2) == {}
    arrays.merge(there, 2)
    objects = {}
    for process in range(2):
        found = arrays.objects_of(there, process, 2)
        assert found
        assert all(path.startswith(f"state/process_{process}/") for path in found)
        objects |= found
    merged = arrays.merged_objects(there, 2)
    assert merged
    assert not {*merged} & {*objects}
    (tmp_path / ".bucket").write_text(there.url)
    one = jax.devices()[0]
    wanted = {
        name: jax.ShapeDtypeStruct(
            (n,), dtype, sharding=jax.sharding.SingleDeviceSharding(one)
        )
        for name, n, dtype in (("w", 16, jnp.float32), ("n", 300, jnp.int32))
    }
    read = stored_arrays.load(tmp_path, wanted)
    np.testing.assert_array_equal(read["w"], values)
    np.testing.assert_array_equal(read["n"], np.arange(300))


def test_one_process_has_nothing_to_merge(there):
    arrays.write(there, arrays.on_host({"n": jnp.arange(3)}), 0, 1)
    before = there.paths()
    assert not any("process_" in path for path in before)
    arrays.merge(there, 1)
    assert there.paths() == before
    assert arrays.merged_objects(there, 1) == {}
    assert arrays.objects_of(there, 0, 1) == there.generations(before)


def test_each_process_compares_its_share_of_the_objects(there, tmp_path):
    assert arrays.find_damage(tmp_path, 0, 1) == []  # its arrays are on the disk
    (tmp_path / ".bucket").write_text(there.url)
    assert arrays.find_damage(tmp_path, 0, 1) == ["manifest.json is damaged"]
    for name in "abc":
        there.write(name, b"1")
    objects = there.generations("abc")
    about = {"url": there.url, "bytes": 3, "objects": objects}
    manifest.write(tmp_path, {}, about)
    assert arrays.find_damage(tmp_path, 0, 1) == []
    there.delete("b")
    there.write("c", b"2")
    assert arrays.find_damage(tmp_path, 0, 2) == ["c was replaced"]
    assert arrays.find_damage(tmp_path, 1, 2) == ["b is missing"]
    manifest.write(tmp_path, {}, about | {"url": "s3://elsewhere/1-ab"})
    assert arrays.find_damage(tmp_path, 0, 1) == ["b is missing"]
    assert arrays.shown(tmp_path) == there.url
    assert arrays.shown(tmp_path / "other") == str(tmp_path / "other")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("CRC-32C mismatch", "is damaged: an array of it has another check"),
        ("NOT_FOUND: no such key", "objects of it are gone; if a run saves there"),
        ("AccessDenied", "cannot read checkpoint .*: access denied"),
    ],
)
def test_why_arrays_cannot_be_read_is_one_line(error, said, there):
    with pytest.raises(UserError, match=said), arrays.explained_reads(there):
        raise ValueError(error)


def test_what_a_database_holds_in_its_nodes_and_what_is_read_at_once(there):
    mib = 2**20
    read = arrays.database(there)
    assert read["experimental_read_coalescing_threshold_bytes"] == mib
    assert read["experimental_read_coalescing_merged_bytes"] == 64 * mib
    assert read["context"]["cache_pool#ocdbt"] == {"total_bytes_limit": 100_000_000}
    assert read["base"] == there.spec("state/")
    assert arrays._DATABASE == {
        "max_inline_value_bytes": 1024,
        "max_decoded_node_bytes": 100_000_000,
        "manifest_kind": "single",
    }


def test_shards_in_host_memory_of_a_gpu_are_copied(monkeypatch):
    def copied(kind: str, platform: str) -> bool:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        values = np.ones(3)

        class Seen:
            sharding = SimpleNamespace(memory_kind=kind)

            def __array__(self, dtype=None, copy=None):
                return values.copy() if copy else values

        one: Any = Seen()
        return arrays._fetched(one) is not values

    assert copied("pinned_host", "gpu")
    assert not copied("device", "gpu")
    assert not copied("pinned_host", "cpu")


def test_verifying_values_reads_every_chunk(there):
    values = np.arange(4 * 8 * 1024, dtype=np.float32).reshape(8, -1)
    state = {"a": sharded(values), "a_scalar": jnp.ones(())}
    arrays.write(there, arrays.on_host(state), 0, 1)
    arrays.verify_values(there, state)
    paths = [path for path in there.paths(arrays.ARRAYS) if "/d/" in path]
    for path in paths:
        content, _ = there.read(path)
        assert content is not None
        if (at := content.find(values[5, :64].tobytes())) >= 0:
            there.write(path, content[:at] + b"\1" + content[at + 1 :])
            break
    with pytest.raises(UserError, match="an array of it has another checksum"):
        arrays.verify_values(there, ["a"])

"""Sizes, counts and seconds that users meet: to change one is to change jshard."""

import importlib
import importlib.util
import sys

import pytest

KIB, MIB = 2**10, 2**20

LIMITS = {
    "buckets.arrays": {"_CHUNK": 32 * MIB, "_OBJECT": 256 * MIB, "_AT_ONCE": 512 * MIB},
    "buckets.files": {"_THREADS": 8},
    "buckets.mirror": {"_THREADS": 8},
    "buckets.objects": {"_SILENCE": 10.0, "_BYTE": slice(0, 1)},
    "buckets.step_list": {"FORMAT": 1},
    "local.copy_files": {"_FORGOTTEN": 24 * 60 * 60.0},
    "local.exchange": {"_PATIENCE": 60.0, "_MOST_CALLERS": 256, "_BLOCK": MIB},
    "local.pieces": {"_ALIGNMENT": 64},
    "manifest": {"FORMAT": 1},
    "metadata": {"_MOST_BYTES": 2**63 - 1, "_MOST_DIMS": 32, "_MOST_LAYERS": 2**20},
    "participants": {"_PATIENCE": 20 * 60.0, "_POLL": 0.5},
    "restore": {"PATIENCE": 30.0},
    "step_folders": {"_LAST": 2**31 - 1, "_QUIET": 1.0, "_LATEST": 20.0},
    "stored_arrays": {"_CHUNK": 256 * MIB, "_FILE": 256 * MIB},
}
OF_JSON = {"MOST_JSON": 32 * MIB, "_DEEPEST": 100}


@pytest.mark.parametrize("module", [*LIMITS, ""])
def test_a_limit_is_what_it_was(module):
    name = f"storage.checkpoint.{module}" if module else "system.files.untrusted"
    there = importlib.import_module(f"jshard.{name}")
    for name, value in LIMITS.get(module, OF_JSON).items():
        assert getattr(there, name) == value, name


@pytest.mark.parametrize(
    ("cores", "hashing", "copying"),
    [(None, 1, 1), (1, 1, 1), (2, 2, 1), (7, 7, 3), (8, 8, 4), (64, 8, 16)],
)
def test_threads_follow_the_cores_up_to_a_limit(cores, hashing, copying, monkeypatch):
    """Hashes take a core each, and copies of shards half of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    found = {}
    for name, variable in (("manifest", "THREADS"), ("local.pieces", "THREADS")):
        module = importlib.import_module(f"jshard.storage.checkpoint.{name}")
        spec = importlib.util.find_spec(module.__name__)
        assert spec is not None
        assert spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        with monkeypatch.context() as patch:  # dataclasses look for their module there
            patch.setitem(sys.modules, module.__name__, fresh)
            spec.loader.exec_module(fresh)
        found[name] = getattr(fresh, variable)
    assert found == {"manifest": hashing, "local.pieces": copying}


def test_requests_are_repeated_for_as_long_as_is_said():
    objects = importlib.import_module("jshard.storage.checkpoint.buckets.objects")
    for context, retries in ((objects.CONTEXT, 10), (objects.AT_START, 6)):
        options = {"max_retries": retries, "initial_delay": "250ms", "max_delay": "20s"}
        assert context == {
            "s3_request_retries": options,
            "gcs_request_retries": options,
        }

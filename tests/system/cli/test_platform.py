"""What a command sets up before JAX creates its devices."""

import os

import jax
import pytest

import jshard
from jshard.system.cli.machine import platform
from jshard.system.cli.machine.platform import cache_compilations, start_devices


def test_programs_in_another_users_folder_are_not_run(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    before = jax.config.values["jax_enable_compilation_cache"]
    try:
        with pytest.warns(UserWarning, match="not cached: .* belongs to another user"):
            cache_compilations(tmp_path)
        assert not jax.config.values["jax_enable_compilation_cache"]
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


@pytest.mark.parametrize("writes", [True, False])
def test_a_cache_in_a_bucket_leaves_xlas_timings_on_the_hosts_disk(
    writes, tmp_path, monkeypatch
):
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/programs")
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: jax.config.values[name] for name in names}
    try:
        cache_compilations(writes=writes)
        given = [jax.config.values[name] for name in names]
        assert given == ["gs://bucket/programs", "none"]  # JAX gives XLA no folder
        folder = tmp_path / ".cache/jshard/autotuned"
        assert folder.is_dir()
        place, mode = os.environ["XLA_FLAGS"].split()
        assert place == f"--xla_gpu_per_fusion_autotune_cache_dir={folder}"
        assert mode.endswith("_UPDATE" if writes else "_READ")
        cache_compilations(writes=writes)  # what is set stays
        assert os.environ["XLA_FLAGS"] == f"{place} {mode}"
        monkeypatch.delenv("XLA_FLAGS")
        monkeypatch.setattr(platform, "_MODE", "xla_gpu_of_another_version")
        cache_compilations(writes=writes)  # XLA would end the process
        assert "XLA_FLAGS" not in os.environ
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("bucket", [True, False])
def test_what_is_set_of_xlas_caches_stays(bucket, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    folder = "s3://bucket/programs" if bucket else str(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
    if bucket:
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "all")
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    before = {name: jax.config.values[name] for name in names}
    try:
        cache_compilations()
        assert jax.config.values[names[1]] == before[names[1]]
        assert "XLA_FLAGS" not in os.environ
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("Unable to initialize backend 'cuda': no plugin\nmore"),
            "no plugin",
        ),
        (AssertionError(), "JAX finds no such device; unset it"),
    ],
)
def test_devices_that_are_asked_for_and_not_there_are_named_in_one_line(
    error, said, monkeypatch
):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(jshard.UserError, match="JAX_PLATFORMS=cuda: ") as found:
        start_devices()
    assert said in str(found.value)
    assert "\n" not in str(found.value)

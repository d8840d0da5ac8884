"""What a command sets up before JAX creates its devices."""

import os

import jax
import pytest

import jshard
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

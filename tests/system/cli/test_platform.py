"""What a command sets up before JAX creates its devices."""

import os

import jax
import pytest

from jshard.system.cli.machine.platform import cache_compilations


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

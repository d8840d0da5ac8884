"""What a deterministic step is refused for, and what is said of it."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from jshard.sharding.step.program import deterministic
from jshard.sharding.step.program.deterministic import check_deterministic
from jshard.system.errors import UserError

GPU = SimpleNamespace(platform="gpu", device_kind="B200", compute_capability="10.0")


def check(function: Any, *args: Any, device: Any = None, devices: int = 8) -> str:
    jaxpr = jax.make_jaxpr(jax.jit(function))(*args).jaxpr
    return check_deterministic(jaxpr, device or jax.devices()[0], devices)


def drawn(x):
    return x + lax.rng_uniform(0.0, 1.0, shape=(4,))


def read(x):
    return x + io_callback(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), x)


def told(x):
    io_callback(lambda x: None, None, x)
    return x


def called(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), x)


@pytest.mark.parametrize(
    ("function", "message"),
    [(drawn, "draws from a state of the device"), (read, "returns what Python compu")],
)
def test_what_cannot_have_the_same_bits_is_refused_with_its_line(function, message):
    with pytest.raises(UserError, match=message) as error:
        check(function, jnp.ones(4))
    assert f"test_deterministic.py:{function.__code__.co_firstlineno + 1} (" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_what_is_not_known_is_named_and_what_returns_nothing_is_not():
    assert "not known" not in check(told, jnp.ones(4))
    assert "; not known of pure_callback at " in check(called, jnp.ones(4))


def test_one_process_of_cpus_is_said_to_add_in_another_order():
    assert "CPUs of one process add in another order" in check(told, jnp.ones(4))


def test_sums_in_nvlinks_switch_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    with pytest.raises(UserError, match="set NCCL_NVLS_ENABLE=0 in the environment"):
        check(told, jnp.ones(4), device=GPU)
    check(told, jnp.ones(4), device=GPU, devices=1)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    check(told, jnp.ones(4), device=GPU)


def test_attention_is_refused_where_cudnn_has_no_deterministic_backward(monkeypatch):
    backward = SimpleNamespace(
        primitive=SimpleNamespace(name="dot_product_attention_bwd"), outvars=[1]
    )
    monkeypatch.setattr(deterministic, "cudnn_version", lambda: (9, 17))
    assert "before cuDNN 9.18" in deterministic._obstacle(backward, GPU)
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert not deterministic._obstacle(backward, hopper)
    monkeypatch.setattr(deterministic, "cudnn_version", lambda: (9, 18))
    assert not deterministic._obstacle(backward, GPU)

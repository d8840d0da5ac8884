"""Which attention a step is given, and that it is the same attention."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import jshard
from jshard.plan import GPUS, tracing_for
from jshard.sharding.settings.policy import ATTENTION_OPERANDS

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
CPU = AbstractDevice("cpu", None, "cpu")


def heads(width: int = 64, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((8, 16, 2, width), dtype)


def attend(q: jax.Array, implementation: str = "auto") -> jax.Array:
    return jshard.nn.dot_product_attention(
        q, q, q, is_causal=True, implementation=implementation
    )


def over(device: AbstractDevice, function: Any) -> Any:
    """The function on eight such devices."""
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((8,), ("fsdp",), auto, abstract_device=device)
    spec = PartitionSpec("fsdp")
    return jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


@pytest.fixture
def chosen(monkeypatch):
    """Traces ``attend`` and returns the implementation that JAX is told to take."""
    told = []

    def record(q, *_, is_causal, implementation, **options):
        del options
        told.append((is_causal, implementation))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)

    def trace(q, device=None, **options):
        function = functools.partial(attend, **options)
        jax.eval_shape(over(device, function) if device else function, q)
        ((is_causal, implementation),) = told
        told.clear()
        assert is_causal
        return implementation

    return trace


@pytest.mark.parametrize("gpu", GPUS)
def test_a_step_for_an_nvidia_gpu_attends_by_cudnn(gpu, chosen):
    device = AbstractDevice(GPUS[gpu].name, GPUS[gpu].cores, "gpu")
    with tracing_for(GPUS[gpu]):
        for dtype in (jnp.bfloat16, jnp.float16):
            for width in (8, 64, 128, *([256] if gpu in ("h100", "h200") else [])):
                assert chosen(heads(width, dtype), device) == "cudnn"
        assert chosen(heads()) == "cudnn"  # in no mesh
        assert chosen(heads(), device, implementation="cudnn") == "cudnn"
        assert chosen(heads(), device, implementation="xla") == "xla"


@pytest.mark.parametrize(
    ("q", "device", "why"),
    [
        (heads(dtype=jnp.float32), H100, "needs bfloat16 or float16, not float32"),
        (
            heads(20),
            H100,
            r"needs a head width .* 128 \(256 on Hopper\), not 20",
        ),
        (heads(264), H100, r"needs a head width .*, up to 128 \(256 .*\), not 264"),
        (heads(), CPU, "needs an NVIDIA GPU of .* 8.0 or more, not cpu"),
    ],
)
def test_what_cudnn_cannot_attend_xla_does_and_asking_for_cudnn_is_an_error(
    q, device, why, chosen
):
    with tracing_for(GPUS["h100"]):
        assert chosen(q, device) == "xla"
        with pytest.raises(jshard.UserError, match=f"^attention 'cudnn' {why}; use"):
            chosen(q, device, implementation="cudnn")


@pytest.mark.parametrize(
    ("capability", "implementation"),
    [("7.5", "xla"), ("8.0", "cudnn"), ("12.0", "cudnn"), ("gfx942", "xla")],
)
def test_a_gpu_of_this_machine_is_asked_what_it_can_do(
    capability, implementation, chosen, monkeypatch
):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    assert chosen(heads(), H100) == implementation
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(heads()) == implementation  # in no mesh


def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(chosen):
    for implementation in ("auto", "cudnn"):
        with pytest.raises(jshard.UserError, match=r"in jshard\.plan\.tracing_for"):
            chosen(heads(), H100, implementation=implementation)
    assert chosen(heads(), H100, implementation="xla") == "xla"


def test_an_unknown_implementation_is_an_error_that_lists_the_known(chosen):
    with pytest.raises(jshard.UserError, match="'flash' is unknown: use auto, xla, cu"):
        chosen(heads(), implementation="flash")


def primitives(implementation: str, device: AbstractDevice) -> str:
    """The text of the program of a gradient."""

    def loss(q):
        return jnp.sum(attend(q, implementation).astype(jnp.float32))

    return str(jax.make_jaxpr(over(device, jax.grad(loss)))(heads()))


def test_cudnns_forward_and_backward_are_traced_without_a_gpu_or_cudnn():
    with tracing_for(GPUS["h100"]):
        program = primitives("cudnn", H100)
    assert "dot_product_attention_fwd" in program
    assert "dot_product_attention_bwd" in program
    assert "dot_product_attention" not in primitives("xla", H100)


def test_what_tracing_for_changes_is_as_before_after_an_error():
    before = dict(vars(fused_attention_stablehlo))
    with tracing_for(GPUS["h100"]):
        assert vars(fused_attention_stablehlo) != before
    with pytest.raises(KeyError), tracing_for(GPUS["h100"]):
        raise KeyError
    assert vars(fused_attention_stablehlo) == before
    with pytest.raises(jshard.UserError, match="is present"):
        primitives("cudnn", H100)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["auto", "xla", "blockwise"])
def test_attention_is_softmax_of_scaled_scores_times_values(implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, T, N, 8)) for T, N in ((5, 4), (7, 2), (7, 2)))
    k4, v4 = np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, k4) / np.sqrt(8)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bnts,bsnh->btnh", weights, v4)
    got = jshard.nn.dot_product_attention(
        *(jax.device_put(np.asarray(x, jnp.float32)) for x in (q, k, v)),
        implementation=implementation,
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_only_operands_of_cudnn_are_named_for_their_residuals(implementation):
    x = jnp.ones((1, 4, 2, 8))
    run = lambda x: attend(x, implementation)
    assert ATTENTION_OPERANDS not in str(jax.make_jaxpr(run)(x))

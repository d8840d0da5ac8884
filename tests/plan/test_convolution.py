"""FLOPs of convolutions in closed form: forward, backward, grouped, depthwise."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from h100 import h100s
from jshard.plan.cost.convolution import is_convolution
from jshard.plan.cost.kernel_work import Work, work
from jshard.plan.hlo.program_text import parse

B, H, K, C, F = 8, 32, 3, 64, 128  # images, side, side of the kernel, channels in, out
CALL = """\
HloModule m, is_scheduled=true

ENTRY %main (x: T[8,32,32,64], w: T[128,3,3,16]) -> T[8,16,16,128] {
  %x = T[8,32,32,64]{3,2,1,0} parameter(0)
  %w = T[128,3,3,16]{3,2,1,0} parameter(1)
  %y = T[8,16,16,128]{3,2,1,0} parameter(2)
  %conv = CALL, dim_labels=b01f_o01i->b01f, feature_group_count=4ATTRIBUTES
  ROOT %first = T[8,16,16,128]{3,2,1,0} get-tuple-element(%conv), index=0
}
"""
FORWARD = "(T[8,16,16,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w)"
BY_INPUT = "(T[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%y, %w)"
BY_KERNEL = "(T[128,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y)"
STRIDED = "window={size=3x3 stride=2x2 pad=1_1x1_1}"


def cost(call: str, attributes: str, dtype: str = "bf16") -> Work:
    text = CALL.replace("CALL", f"{call}, {STRIDED}", 1)
    module = parse(text.replace("ATTRIBUTES", attributes).replace("T[", f"{dtype}["))
    return work(module, module.entry, module.instructions["conv"])


@pytest.mark.parametrize(
    ("call", "target"),
    [
        (FORWARD, "Forward"),
        (FORWARD, "BiasActivationForward"),
        (BY_INPUT, "BackwardInput"),
        (BY_KERNEL, "BackwardFilter"),
    ],
)
def test_calls_of_cudnn_have_the_flops_of_the_forward(call, target):
    found = cost(call, f', custom_call_target="__cudnn$conv{target}"')
    assert found.kind == "matrix product"
    assert found.flops == 2 * (B * 16 * 16) * F * K * K * 16
    x, w, y = B * H * H * C, F * K * K * 16, B * 16 * 16 * F
    assert found.bytes == 2 * (x + w + y)


def test_float32_runs_at_half_the_rate():
    target = ', custom_call_target="__cudnn$convForward"'
    half, whole = (cost(FORWARD, target, t).flops for t in ("bf16", "f32"))
    assert whole == 2 * half


HLO = """\
HloModule m, is_scheduled=true

ENTRY %main (x: bf16[8,16,16,128], w: bf16[3,3,64,128]) -> bf16[8,32,32,64] {
  %x = bf16[8,16,16,128]{3,2,1,0} parameter(0)
  %w = bf16[3,3,64,128]{3,2,1,0} parameter(1)
  ROOT %conv = bf16[8,32,32,64]{3,2,1,0} convolution(%x, %w), \
    window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2 rhs_reversal=1x1}, \
    dim_labels=b01f_01oi->b01f
}
"""


def test_holes_of_a_dilated_input_are_not_multiplied():
    module = parse(HLO)
    found = work(module, module.entry, module.instructions["conv"])
    assert found.flops == 2 * (B * 16 * 16) * F * K * K * C


@pytest.mark.parametrize(
    ("groups", "channels", "slower"), [(1, 3, 1), (4, 64, 1), (8, 64, 2), (64, 64, 16)]
)
def test_narrow_groups_leave_the_tensor_cores_in_part_empty(groups, channels, slower):
    text = (
        "HloModule m\n\n"
        f"ENTRY %main (x: bf16[8,32,32,{channels}]) -> bf16[8,32,32,64] {{\n"
        f"  %x = bf16[8,32,32,{channels}]{{3,2,1,0}} parameter(0)\n"
        f"  %w = bf16[64,3,3,{channels // groups}]{{3,2,1,0}} parameter(1)\n"
        "  ROOT %conv = (bf16[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%x, %w), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "
        + f"feature_group_count={groups}, " * (groups > 1)
        + 'custom_call_target="__cudnn$convForward"\n}\n'
    )
    module = parse(text)
    found = work(module, module.entry, module.instructions["conv"])
    assert found.flops == slower * 2 * (B * H * H * 64) * K * K * channels / groups


# XLA gives the gradient by a strided input in groups, which cuDNN's backward call is
# not used for, to the forward call with zeros between the gradient's elements.
@pytest.mark.h100
@pytest.mark.parametrize(
    ("stride", "groups", "by_input"), [(1, 1, 1), (2, 1, 1), (1, 4, 1), (2, 4, 4)]
)
def test_a_compiled_convolution_has_three_times_the_flops_of_its_forward(
    stride, groups, by_input
):
    sharding = NamedSharding(h100s(1), PartitionSpec())

    def abstract(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (stride, stride), ((1, 1), (1, 1)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    def step(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, back = jax.vjp(convolved, x, w)
        return y, back(dy)

    side = H // stride
    arguments = abstract(B, H, H, C), abstract(K, K, C // groups, F)
    lowered = jax.jit(step).lower(*arguments, abstract(B, side, side, F))
    module = parse(lowered.compile().as_text() or "")
    calls = [x for x in module.entry.instructions if is_convolution(x)]
    assert len(calls) == 3
    forward = 2 * (B * side**2) * F * K * K * C // groups
    counted = sorted(work(module, module.entry, x).flops for x in calls)
    assert counted == [forward, forward, by_input * forward]

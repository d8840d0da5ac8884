"""Constants of the cost model, from a file."""

import dataclasses
import json

import pytest

import jshard
from jshard.plan.cost.assumptions import assumed, assumptions
from jshard.plan.cost.kernel_work import Work, work
from jshard.plan.cost.transfers import Transfer
from jshard.plan.fit.hardware import FITTED, GPUS, STATED, find_constants
from jshard.plan.hlo.program_text import parse

H100 = dataclasses.replace(GPUS["h100"], constants=STATED)
PRODUCT = Work("matrix product", 1e15, 0)
ATTENTION = Work("attention", 1e15, 0)
GATHER = Transfer("all-gather", (("bf16", 2**30),), 8, 8)


def test_what_a_file_leaves_out_stays_as_stated(tmp_path):
    file = tmp_path / "h100.json"
    file.write_text(json.dumps({"matmul": 0.36, "source": "an H100, 2026-11-22"}))
    constants = find_constants(file)
    assert constants == dataclasses.replace(
        STATED, matmul=0.36, source="an H100, 2026-11-22"
    )
    assert assumptions(constants)["matrix_products_of_peak"] == 0.36
    assert "(an H100, 2026-11-22)" in assumed(constants)


def test_the_file_is_the_source_of_constants_that_name_none(tmp_path):
    file = tmp_path / "h100.json"
    file.write_text("{}")
    assert find_constants(file) == dataclasses.replace(STATED, source=str(file))


def test_fitted_constants_are_the_default_and_stated_ones_have_a_name(tmp_path):
    assert GPUS["h100"].constants == find_constants("fitted") == FITTED
    assert find_constants("stated") == STATED
    file = tmp_path / "h100.json"
    file.write_text('{"matmul": 0.5}')
    assert find_constants(str(file)).matmul == 0.5


def test_only_what_runs_confirm_has_a_range(tmp_path):
    low, high = FITTED.range_of(2.0, "bf16 on H100") or (0.0, 0.0)
    assert 1.8 <= low < 2.0 < high <= 2.22
    confirmed_by_none = (
        "float8 on H200",
        "bf16 on B200",
        "mxfp8 on B200",
        "nvfp4 on B200",
    )
    for kind in (*confirmed_by_none, "bf16 with experts on H100"):
        assert FITTED.range_of(2.0, kind) is None
    assert STATED.range_of(2.0, "bf16 on H100") is None
    file = tmp_path / "h100.json"
    file.write_text('{"low": 0.95, "high": 1.2}')
    assert find_constants(file).range_of(2.0, "float32 on a GPU") == (1.9, 2.4)


@pytest.mark.parametrize("share", ["float8", "mxfp8", "nvfp4"])
def test_products_in_float8_have_a_share_of_their_own(share):
    half = dataclasses.replace(STATED, **{share: 0.36})
    slow = dataclasses.replace(H100, constants=half)
    kinds = ("matrix product", "float8 product", "MXFP8 product", "NVFP4 product")
    for kind in kinds:
        factor = 2 if kind.lower().startswith(share) else 1
        product = Work(kind, 1e15, 0)
        both = (product.seconds(gpu) - STATED.launch for gpu in (slow, H100))
        assert next(both) == pytest.approx(factor * next(both))


def test_block_scaled_calls_of_cudnn_are_products_at_twice_the_rate():
    text = """\
HloModule m, is_scheduled=true

ENTRY %main (x: f8e4m3fn[256,128]) -> bf16[256,512] {
  %x = f8e4m3fn[256,128]{1,0} parameter(0)
  %w = f8e4m3fn[512,128]{1,0} parameter(1)
  %s = f8e8m0fnu[256,4]{1,0} parameter(2)
  %t = f8e8m0fnu[512,4]{1,0} parameter(3)
  %y = (bf16[256,512]{1,0}, u8[0]{0}) custom-call(%x, %w, %s, %t), TARGET
  ROOT %first = bf16[256,512]{1,0} get-tuple-element(%y), index=0
}
"""
    target = 'custom_call_target="__cudnn$blockScaledDot"'
    module = parse(text.replace("TARGET", target))
    found = work(module, module.entry, module.instructions["y"])
    assert (found.kind, found.flops) == ("MXFP8 product", 2 * 256 * 512 * 128 / 2)
    assert found.bytes == (256 + 512) * (128 + 4) + 2 * 256 * 512
    # In four bits, with a scale for each 16, at four times the rate or six.
    text = text.replace("f8e4m3fn", "f4e2m1fn").replace("f8e8m0fnu", "f8e4m3fn")
    text = text.replace("256,4]", "256,8]").replace("512,4]", "512,8]")
    module = parse(text.replace("TARGET", target))
    found = work(module, module.entry, module.instructions["y"])
    assert (found.kind, found.flops) == ("NVFP4 product", 2 * 256 * 512 * 128 / 4)
    assert found.bytes == (256 + 512) * (64 + 8) + 2 * 256 * 512
    large = found._replace(flops=1e15)
    b200, b300, gb200, gb300 = (
        large.seconds(GPUS[kind]) - GPUS[kind].constants.launch
        for kind in ("b200", "b300", "gb200", "gb300")
    )
    # 9, 13.5, 10 and 15 PFLOP/s.
    assert [b200 / x for x in (b300, gb200, gb300)] == pytest.approx(
        [1.5, 10 / 9, 5 / 3]
    )


def test_times_follow_the_constants():
    halved = dataclasses.replace(
        STATED, matmul=0.36, link=STATED.link / 2, launch=STATED.launch / 2
    )
    slow = dataclasses.replace(H100, constants=halved)
    both = PRODUCT.seconds(slow) - halved.launch, PRODUCT.seconds(H100) - STATED.launch
    assert both[0] == pytest.approx(2 * both[1])
    assert ATTENTION.seconds(slow) == pytest.approx(
        ATTENTION.seconds(H100) - STATED.launch / 2
    )
    assert GATHER.seconds(slow) == pytest.approx(2 * GATHER.seconds(H100), rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object of names and numbers"),
        ('{"matmull": 1}', "unknown constant 'matmull'; possible: matmul, float8"),
        ('{"matmul": 0}', "matmul=0 must be a number above 0"),
        ('{"launch": "3"}', "launch='3' must be a number above 0"),
        ('{"memory": NaN}', "memory=nan must be a number above 0"),
        ('{"memory": true}', "memory=True must be a number above 0"),
        ('{"source": 3}', "source=3 must be text"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(text, said, tmp_path):
    file = tmp_path / "h100.json"
    file.write_text(text)
    with pytest.raises(jshard.UserError, match=said) as caught:
        find_constants(file)
    assert str(caught.value).startswith(f"--constants={file}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(jshard.UserError, match="No such file"):
        find_constants(tmp_path / "h100.json")

"""`--fit`: the constants of the cost model, from a trace."""

import dataclasses
import json
from typing import Any

import pytest

from gpu_profiles import Kernel, write_profile
from jshard.plan import compare, hlo
from jshard.plan.cost.timeline import replay
from jshard.plan.fit.hardware import GPUS, STATED, find_constants
from jshard.plan.planning import Plan
from jshard.plan.trace.constants_fit import fit_constants
from jshard.system.errors import UserError

FITTED = ("launch", "memory", "matmul", "link", "network_port")
H100 = dataclasses.replace(GPUS["h100"], constants=STATED)
TRUTH = dataclasses.replace(
    STATED, launch=7e-6, memory=0.6, matmul=0.5, link=0.6, network_port=20e9
)


def module(sizes: tuple[int, ...]) -> hlo.Module:
    """Products, kernels of memory, gathers, and kernels with nothing to do."""
    lines = ["%p = bf16[8]{0} parameter(0)"]
    for i, n in enumerate(sizes):
        square, part = f"bf16[{n},{n}]{{1,0}}", f"bf16[{n},{n // 4}]{{1,0}}"
        lines += [
            f"%x.{i} = {square} broadcast(%p), dimensions={{}}",
            f"%dot.{i} = {square} dot(%x.{i}, %x.{i}), lhs_contracting_dims={{1}}, "
            f'rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/dot"}}',
            f"%add.{i} = {square} add(%dot.{i}, %dot.{i})",
            f"%s.{i} = {part} slice(%x.{i}), slice={{[0:{n}], [0:{n // 4}]}}",
            f"%gather.{i} = ({part}, {square}) all-gather-start(%s.{i}), "
            "replica_groups={{0,1}}, dimensions={1}",
            f"%done.{i} = {square} all-gather-done(%gather.{i})",
            f"%tiny.{i} = bf16[8]{{0}} negate(%p)",
        ]
    lines.append("ROOT %r = bf16[8]{0} negate(%p)")
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        "HloModule step, is_scheduled=true\n\nENTRY %main (p: bf16[8]) -> bf16[8] {\n"
        f"{body}\n}}\n"
    )


def traced(
    folder: Any, gpu: Any, sizes: tuple[int, ...], truth: Any = TRUTH
) -> tuple[Plan, Any]:
    """A plan by stated constants, and a trace of a GPU that has the true ones."""
    nothing: Any = None
    program = module(sizes)
    plan = Plan(
        name="step", about="", topology="", gpu=gpu, devices=2, device_kind="",
        text="HloModule step, is_scheduled=true", module=program, memory=nothing,
        traffic=nothing, timeline=replay(program, gpu, 2),
    )  # fmt: skip
    events = replay(program, dataclasses.replace(gpu, constants=truth), 2).events
    end = max(event.end for event in events)
    ran = [
        Kernel(e.stream, e.name, begin + e.start, begin + e.end)
        for begin in (0.0, end)
        for e in events
    ]
    return plan, compare(plan, write_profile(folder, {0: ran, 1: ran}))


@pytest.mark.parametrize("in_host", [True, False])
def test_the_constants_of_a_known_gpu_are_recovered_within_2_percent(tmp_path, in_host):
    gpu = H100 if in_host else dataclasses.replace(H100, host=1, domain=1)
    plan, found = traced(tmp_path, gpu, (4096, 6144, 8192, 12288))
    fit = fit_constants(plan, found)
    link = "link" if in_host else "network_port"
    assert {*fit.counts} == {"launch", "memory", "matmul", link}
    for name in fit.counts:
        wanted = getattr(TRUTH, name)
        assert getattr(fit.constants, name) == pytest.approx(wanted, rel=0.02), name
    assert fit.predicted == pytest.approx(found.step_seconds, rel=0.01)
    for name in set(FITTED) - {*fit.counts}:  # what the trace does not tell
        assert getattr(fit.constants, name) == getattr(STATED, name)


def test_constants_that_hide_each_other_at_first_are_found_too(tmp_path):
    truth = dataclasses.replace(STATED, launch=5e-7, memory=0.1, matmul=0.9)
    plan, found = traced(tmp_path, H100, (256, 512, 1024, 2048, 4096, 6144), truth)
    fit = fit_constants(plan, found)  # by one round launches take five times as long
    assert fit.constants.launch == pytest.approx(truth.launch, rel=0.02)
    assert fit.constants.memory == pytest.approx(truth.memory, rel=0.02)


def test_a_fit_is_a_file_of_constants_and_says_what_it_cannot_tell(tmp_path):
    plan, found = traced(tmp_path / "trace", H100, (4096, 6144, 8192))
    fit = fit_constants(plan, found)
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(fit.as_json()))
    read = find_constants(file)
    assert read == dataclasses.replace(fit.constants, confirmed=None)
    assert read.range_of(1.0, "bf16 on H100") is None  # one program confirms nothing
    text = "\n".join(fit.lines())
    assert "matmul 0.5, fitted to 3 instructions" in text
    assert "the trace does not tell float8, mxfp8, nvfp4, attention, network" in text
    assert "49.6% of the peak (1 of 464G FLOP)" in text
    assert "refitted        4.36 ms per step, where 4.36 ms were measured" in text


def test_a_step_too_small_to_tell_is_refused(tmp_path):
    plan, found = traced(tmp_path, H100, (4096,))
    nothing = dataclasses.replace(found, measured=())
    with pytest.raises(UserError, match=r"fewer than 3 instructions .* a larger step"):
        fit_constants(plan, nothing)
    other = dataclasses.replace(plan, timeline=None)
    with pytest.raises(UserError, match="no planned times for these devices"):
        fit_constants(other, found)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--fit=c.json"], "--fit=c.json: fits constants to a --profile=DIR"),
        (["--baseline=b"], "--baseline=b: is compared with a --profile=DIR"),
        (["--profile=p", "--baseline=b", "--fit=c.json"],
         "--baseline=b: stands in for the plan, which --fit needs; drop one"),
        (["--profile=p", "--search"], "--profile=p: is compared with one plan, and"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("of", ["--config=gpt.py", "--from-hlo=program.txt"])
def test_what_a_profile_is_read_for_is_said(plan, of, words, problem):
    if of.startswith("--from-hlo") and "--search" in words:
        problem = "--search: is of a recipe, and --from-hlo plans a file"
    code, _, error = plan(of, "--topology=attached", *words)
    assert code == 2
    assert problem in error

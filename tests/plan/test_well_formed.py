"""Damaged files of programs are one line, or still a plan."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jshard
from jshard.plan import hlo, plan_file
from jshard.plan.hlo.well_formed import MOST_RUNS, problems, runs
from jshard.plan.output import plan_text

LOOP = """HloModule step, is_scheduled=true, num_partitions=2

%kernel (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %exp = f32[64]{0} exponential(%p)
}

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64]{0} get-tuple-element(%s), index=1
  %start = (f32[64]{0}, f32[128]{0}) all-gather-start(%x), replica_groups={{0,1}}, \
dimensions={0}
  %done = f32[128]{0} all-gather-done(%start)
  %y = f32[64]{0} fusion(%x), kind=kLoop, calls=%kernel
  ROOT %out = (s32[], f32[64]{0}) tuple(%i, %y)
}

%condition (s.1: (s32[], f32[64])) -> pred[] {
  %s.1 = (s32[], f32[64]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: s32[], b: f32[64]) -> (s32[], f32[64]) {
  %a = s32[] parameter(0)
  %b = f32[64]{0} parameter(1)
  %t = (s32[], f32[64]{0}) tuple(%a, %b)
  ROOT %loop = (s32[], f32[64]{0}) while(%t), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def planned(folder, text: str) -> str:
    file = folder / "step.hlo"
    file.write_text(text)
    return "\n".join(plan_text.lines(plan_file(file, "h100:2")))


def test_a_program_that_holds_together_has_no_problem(tmp_path):
    module = hlo.parse(LOOP)
    assert not [*problems(module)]
    assert runs(module, module.entry) == 4 + 3 * 7
    assert "all-gather" in planned(tmp_path, LOOP)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("fusion(%x)", "fusion(%z)", "y reads z, which is not before it in body"),
        ("calls=%kernel", "calls=%kernels", "y calls kernels, which is not there"),
        ("fusion(%x)", "fusion(%x, %x)", "y gives 2 operands to kernel"),
        (", calls=%kernel", "", "y has no calls="),
        (", body=%body", "", "loop has no body="),
        ("  ROOT %exp", "  %exp", "kernel has not one result"),
        ("parameter(1)", "parameter(2)", "main has parameters 0, 2"),
        ("%y = f32[64]{0} f", "%x = f32[64]{0} f", "body has x twice"),
        ("calls=%kernel", "calls=%body", "body calls itself"),
        ("all-gather-start(%x)", "all-gather-start()", "start has fewer operands than"),
        ("f32[64]{0} exp", "f32(64) exp", "exp has a type that is not understood"),
        ("%condition (s.1", "%conditions (s.1", "loop calls condition, which is not"),
    ],
)
def test_what_does_not_hold_together_is_one_line(tmp_path, old, new, says):
    assert old in LOOP
    with pytest.raises(jshard.UserError, match=re.escape(says)) as raised:
        planned(tmp_path, LOOP.replace(old, new))
    assert "\n" not in str(raised.value)


def test_a_loop_that_no_timeline_can_hold_has_memory_and_traffic(tmp_path):
    text = planned(tmp_path, LOOP.replace('"n":"3"', f'"n":"{MOST_RUNS}"'))
    assert "note: a call runs 70,000,004 instructions, and a timeline has" in text
    assert "TIMELINE        none: the program runs too many instructions" in text
    assert "10,000,000" in next(x for x in text.splitlines() if "all-gather" in x)


@settings(max_examples=60)
@given(data=st.data())
def test_whatever_is_damaged_is_planned_or_refused(tmp_path_factory, data):
    lines = LOOP.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        how = data.draw(st.sampled_from(["drop", "repeat", "cut", "write"]))
        if how == "write":
            place = data.draw(st.integers(0, len(lines[at])))
            word = data.draw(st.sampled_from([*"(){}%,=", "9", "%x", "while(", " = "]))
            lines[at] = lines[at][:place] + word + lines[at][place + 1 :]
        else:
            lines[at : at + 1] = {"repeat": lines[at : at + 1] * 2}.get(how, [])
            lines = (lines[:at] if how == "cut" else lines) or [""]
    said = ""
    try:
        planned(tmp_path_factory.mktemp("hlo"), "".join(lines))
    except jshard.UserError as error:
        said = str(error)
    assert "\n" not in said

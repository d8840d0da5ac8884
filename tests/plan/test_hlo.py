"""The parser of optimized HLO, on programs small enough to count by hand."""

import dataclasses

import pytest

from hlo import Array, collectives, dots
from jshard.plan import hlo as plan_hlo
from jshard.sharding.settings.scopes import FURTHER_ROUNDS

HEADER = "HloModule test, is_scheduled=true, num_partitions=8\n"

NESTED = (
    HEADER
    + """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %p = (s32[], f32[2,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[2,16]{1,0} get-tuple-element(%p), index=1
  %full = f32[16,16]{1,0} all-gather(%x), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, metadata={op_name="jit(f)/gather"}
  %part = f32[2,16]{1,0} reduce-scatter(%full), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  ROOT %out = (s32[], f32[2,16]{1,0}) tuple(%i, %part)
}

%condition (p: (s32[], f32[2,16])) -> pred[] {
  %p = (s32[], f32[2,16]{1,0}) parameter(0)
  %flags = pred[] constant(false)
  ROOT %any = pred[] all-reduce(%flags), replica_groups={}, to_apply=%add
}

%outer (p: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %p = (s32[], f32[2,16]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[2,16]{1,0}) while(%p), condition=%condition, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (p: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %p = (s32[], f32[2,16]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[2,16]{1,0}) while(%p), condition=%condition, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501
)


def entry(instructions: str) -> str:
    return f"{HEADER}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{instructions}\n}}\n"


def test_loop_bodies_count_times_their_trips_and_nested_loops_multiply():
    counted = {}
    for c in collectives(NESTED):
        counted[c.kind] = counted.get(c.kind, 0) + c.times
    # Conditions run once more: 5 outer trips of 3 + 1, and 5 + 1.
    assert counted == {"all-gather": 15, "reduce-scatter": 15, "all-reduce": 26}


def test_shapes_dtypes_sources_and_bytes_are_read():
    (gather,) = (c for c in collectives(NESTED) if c.kind == "all-gather")
    assert gather.operands == (Array("f32", (2, 16)),)
    assert gather.results == (Array("f32", (16, 16)),)
    assert gather.source == "jit(f)/gather"
    assert gather.wire_bytes == 15 * 16 * 16 * 4 * 7 // 8
    (scatter,) = (c for c in collectives(NESTED) if c.kind == "reduce-scatter")
    assert scatter.wire_bytes == gather.wire_bytes
    assert Array("bf16", (3,)).bytes == 6
    assert Array("pred", (3,)).bytes == 3
    assert Array("s64", ()).bytes == 8


def test_a_collective_in_a_loop_without_a_known_trip_count_is_an_error():
    text = NESTED.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    with pytest.raises(ValueError, match="all-reduce in a loop with no known trip"):
        collectives(text)


def test_further_rounds_of_exchanges_count_with_an_uneven_choice():
    scope = f"{FURTHER_ROUNDS} from 1.25 by 0.5"
    rounds = f', metadata={{op_name="jit(f)/{scope}/while"}}'
    text = NESTED.replace(', backend_config={"known_trip_count":{"n":"3"}}', rounds)
    assert {c.kind: c.times for c in collectives(text)}["all-gather"] == 0
    module = plan_hlo.parse(text)
    loop = module.computations["outer"].root
    for imbalance, trips in {1.0: 0, 1.25: 0, 1.3: 1, 1.75: 1, 3.0: 4}.items():
        assert dataclasses.replace(module, imbalance=imbalance).trips(loop) == trips


def test_a_loop_without_collectives_needs_no_trip_count():
    text = NESTED.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    text = "\n".join(
        line
        for line in text.splitlines()
        if not any(kind in line for kind in ("all-gather", "all-reduce", "scatter("))
    )
    assert collectives(text) == []


def test_calls_and_both_branches_of_a_conditional_are_followed():
    text = (
        HEADER
        + """
%one (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}
%two (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %r = f32[4]{0} call(%x), to_apply=%one
}
ENTRY %main (p: pred[], x: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x = f32[4]{0} parameter(1)
  ROOT %r = f32[4]{0} conditional(%p, %x, %x), branch_computations={%one, %two}
}
"""
    ).replace(", to_apply=%add", "")
    assert [(c.kind, c.group, c.times) for c in collectives(text)] == [
        ("all-reduce", 8, 1)
    ] * 2


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['replica'=2,'fsdp'=4] {'fsdp'}", 4),
        ("mesh['replica'=2,'fsdp'=4] {'replica','fsdp'}", 8),
        ("{}", 8),
    ],
)
def test_every_notation_of_groups_is_read(groups, size):
    reduce = f"  ROOT %r = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"
    (found,) = collectives(entry("  %x = f32[4]{0} parameter(0)\n" + reduce))
    assert found.group == size
    assert found.wire_bytes == 2 * 16 * (size - 1) // size


@pytest.mark.parametrize(
    "groups", ["{{0},{1},{2},{3}}", "[8,1]<=[8]", "mesh['a'=1,'b'=8] {'a'}"]
)
def test_groups_of_one_device_do_not_count(groups):
    reduce = f"  ROOT %r = f32[4]{{0}} all-reduce(%x), replica_groups={groups}"
    assert collectives(entry("  %x = f32[4]{0} parameter(0)\n" + reduce)) == []


def test_combined_and_asynchronous_collectives_are_taken_apart():
    text = entry(
        """
  %x = f32[4]{0} parameter(0)
  %y = bf16[2,3]{1,0} parameter(1)
  %all = (f32[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce(%x, /*index=1*/%y), replica_groups={}
  %start = (f32[4]{0}, f32[32]{0}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %done = f32[32]{0} all-gather-done(%start)
  ROOT %sent = f32[4]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
"""  # noqa: E501
    )
    reduce, gather, permute = collectives(text)
    assert reduce.operands == (Array("f32", (4,)), Array("bf16", (2, 3)))
    assert reduce.wire_bytes == 2 * (16 + 12) * 7 // 8
    assert (gather.kind, gather.results) == ("all-gather", (Array("f32", (32,)),))
    assert (permute.kind, permute.wire_bytes) == ("collective-permute", 16)


def test_products_count_in_loops_and_fusions_with_all_that_they_add_up():
    text = NESTED.replace(
        "ROOT %out = (s32[]",
        "%y = f32[16,16]{1,0} fusion(%x), kind=kOutput, calls=%fused\n"
        "  ROOT %out = (s32[]",
    ).replace(
        "%inner (",
        """%fused (a: f32[2,16]) -> f32[16,16] {
  %a = f32[2,16]{1,0} parameter(0)
  ROOT %y = f32[16,16]{1,0} dot(%a, %a), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
%inner (""",  # noqa: E501
    )
    (dot,) = dots(text)
    assert (dot.result, dot.contracted, dot.times) == (Array("f32", (16, 16)), 2, 15)
    assert dot.flops == 15 * 2 * 16 * 16 * 2
    batched = """
  %a = f32[3,4,5,6]{3,2,1,0} parameter(0)
  %b = f32[3,5,7,6]{3,2,1,0} parameter(1)
  ROOT %y = f32[3,4,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,3}"""  # noqa: E501
    (dot,) = dots(entry(batched))
    assert dot.flops == 2 * 3 * 4 * 7 * (5 * 6)


def test_a_product_in_a_loop_without_a_known_trip_count_is_an_error():
    loop = NESTED.replace(
        "%part =",
        "%y = f32[2,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}\n  %part =",
    )
    assert [dot.times for dot in dots(loop)] == [15]
    with pytest.raises(ValueError, match="dot in a loop with no known trip"):
        dots(loop.replace(', backend_config={"known_trip_count":{"n":"3"}}', ""))


def test_text_that_is_no_program_is_an_error():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        collectives("module @jit_f {}")

"""Each knob of the traffic moves what it says: groups, deferral, dtypes on the wire.

The CPU compiler keeps float16 and int8 on the wire, but turns bfloat16 into float32:
where a test uses that, the program before compilation tells.
"""

import re
from collections import Counter

import numpy as np
import pytest
from flax import nnx

import hlo
import jshard
from decoder import (
    REMATS,
    TABLE,
    Sizes,
    check_counts,
    counted,
    local_tokens,
    lower_step,
    make_fsdp,
    policies,
)
from jshard.sharding.float8.scales import BLOCK
from jshard.sharding.layout.layer_dims import layer_dims
from parity import every_pair

SIZES = Sizes()


def step_collectives(
    policy: jshard.Policy, *, replica: int = 1, sizes: Sizes = SIZES
) -> tuple[list[hlo.Collective], dict[str, int]]:
    """Of a step of the decoder; and the elements of each parameter (of a layer).

    All but those of the embedding, whose rows are exchanged (``test_embedding.py``).
    """
    fsdp = make_fsdp(policy, replica=replica)
    lowered, state = lower_step(fsdp, sizes)
    elements = {}
    for path, variable in nnx.to_flat_state(state.params):
        shape = np.shape(variable.get_value())
        layered = layer_dims(variable) > 0
        elements[".".join(map(str, path))] = int(np.prod(shape[layered:]))
    tokens = local_tokens(fsdp)
    del elements[TABLE]
    exchanged = (8 // replica * tokens, tokens * sizes.width)
    found = [
        c
        for c in hlo.collectives(hlo.compile(lowered).as_text())
        if c.kind != "all-to-all" or sum(x.size for x in c.operands) not in exchanged
    ]
    return found, elements


def runs(name: str) -> int:
    return SIZES.layers if name.startswith("blocks.") else 1


def wire(found: list[hlo.Collective], kind: str) -> dict[tuple[int, str], int]:
    """Bytes that a device sends, by (devices, dtype), less scalars."""
    sent: Counter = Counter()
    for c in found:
        if c.kind == kind and not hlo.is_number(c.operands[0]):
            sent[c.group, c.operands[0].dtype] += c.wire_bytes
    return dict(sent)


def asked(policy: jshard.Policy, kind: str) -> set[str]:
    """Dtypes of the collectives of a kind in the program before compilation."""
    text = lower_step(make_fsdp(policy), SIZES)[0].as_text("hlo")
    return set(re.findall(rf"= (\w+)\[\d[^\]]*\]\S* {kind}\(", text))


# Groups.


@pytest.mark.slow  # by default, some layers gather within groups of two, below
@every_pair(
    mesh=((1, 1), (1, 2), (1, 8), (2, 4), (8, 1)),  # replicas, devices of a group
    remat=("full", "names", "none"),
    accumulate=(1, 2),
    plain=(False, True),
)
def test_the_backward_gathers_within_groups_alone(case):
    (replica, group), (remat, reads) = case["mesh"], REMATS[case["remat"]]
    policy = policies(
        remat=remat, reshard_after_forward=group, accumulate=case["accumulate"]
    )
    check_counts(policy, reads, replica=replica, plain=case["plain"])


@pytest.mark.slow  # the counts above have sizes, too
def test_groups_send_their_part_of_what_the_backward_reads():
    found, elements = step_collectives(policies(reshard_after_forward=2))
    reads = REMATS["full"][1]
    total = sum(size * runs(name) for name, size in elements.items())
    again = sum(elements[name] * runs(name) for name in reads)
    # (n - 1)/n of every parameter over all, and 1/2 of what is read over two.
    assert wire(found, "all-gather") == {
        (8, "f32"): 4 * total * 7 // 8,
        (2, "f32"): 4 * again // 2,
    }
    assert wire(found, "reduce-scatter") == {(8, "f32"): 4 * total * 7 // 8}


# Some layers, and the root.


@pytest.mark.quick("{'reshard_after_forward': 2, 'first_k': 1")
@pytest.mark.parametrize(
    ("knobs", "remat"),
    [
        ({"first_k": 0}, "full"),
        ({"reshard_after_forward": 2, "first_k": 2}, "full"),
        ({"reshard_after_forward": 2, "first_k": 1, "reshard_root": True}, "dots"),
    ],
    ids=str,
)
def test_some_layers_keep_more_and_gather_less(knobs, remat):
    remat, reads = REMATS[remat]
    if "reshard_root" in knobs:
        reads = reads | {"norm.scale"}
    check_counts(policies(remat=remat, **knobs), reads)


@pytest.mark.slow
@every_pair(
    remat=("full", "names"),
    reshard_after_forward=(True, False, 4),
    first_k=(None, 0, 2, 4),
    accumulate=(1, 2),
)
def test_some_layers_hold_for_every_pair_of_choices(case):
    remat, reads = REMATS[case["remat"]]
    check_counts(policies(**case | {"remat": remat}), reads)


@pytest.mark.slow  # by default, the case above reshards the root, too
@pytest.mark.parametrize(
    ("reshard", "replica", "plain", "accumulate"),
    [
        (True, 1, False, 1),
        (True, 1, False, 2),
        (2, 1, True, 2),
        (1, 2, False, 2),
        (True, 2, True, 2),
    ],
)
def test_the_backward_gathers_the_root_again_when_it_is_resharded(
    reshard, replica, plain, accumulate
):
    remat, reads = REMATS["full"]
    policy = policies(remat=remat, reshard_root=reshard, accumulate=accumulate)
    check_counts(policy, reads | {"norm.scale"}, replica=replica, plain=plain)


# Deferred scatters.


@pytest.mark.quick("none-True-2")
@every_pair(
    remat=("full", "none"),
    reshard_after_forward=(True, False, 1),
    replica=(1, 2, 8),
    accumulate=(1, 4),
    plain=(False, True),
)
def test_deferred_gradients_are_gathered_and_scattered_once_a_step(case):
    knobs = {k: case[k] for k in ("reshard_after_forward", "accumulate")}
    policy = policies(remat=REMATS[case["remat"]][0], defer_scatter=True, **knobs)
    check_counts(policy, set(), replica=case["replica"], plain=case["plain"])


# Dtypes.


@pytest.mark.slow  # test_sums.py has such sums alone
def test_sums_in_another_dtype_leave_as_all_to_alls_of_as_many_bytes():
    half = jshard.Precision(reduce="float16", sum="float32")
    found, elements = step_collectives(policies(precision=half), replica=2)
    total = sum(size * runs(name) for name, size in elements.items())
    assert wire(found, "all-to-all") == {(4, "f16"): 2 * total * 3 // 4}
    assert wire(found, "reduce-scatter") == {}
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.times for c in exchanges) == sum(map(runs, elements))
    # Over replicas the sums go as they are, the embedding's, too.
    total += SIZES.vocab * SIZES.width
    assert wire(found, "all-reduce") == {(2, "f32"): 4 * total // 4}


@pytest.mark.slow  # test_sums.py has the scatter alone
def test_bfloat16_gradients_that_add_up_in_float32_travel_in_bfloat16():
    half = jshard.Precision(reduce="bfloat16", sum="float32")
    looked_up = {"s32", "f32"}  # ids, and rows as they are
    assert asked(policies(precision=half), "all-to-all") == {"bf16"} | looked_up
    assert asked(policies(precision=half), "reduce-scatter") == set()


@pytest.mark.slow  # test_sums.py has the scatter alone
def test_sums_in_the_dtype_of_the_wire_are_reduce_scatters():
    same = jshard.Precision(reduce="bfloat16", sum="bfloat16")
    whole = policies(precision=same, defer_scatter=True)  # no rows are exchanged
    assert asked(whole, "all-to-all") == set()
    assert asked(policies(precision=same), "reduce-scatter") == {"bf16"}


@pytest.mark.slow  # test_precision.py has overrides, test_products.py bytes
@pytest.mark.parametrize(
    "dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)]
)
def test_what_an_override_names_travels_in_its_own_dtypes_and_others_in_bytes(dtype):
    sizes = Sizes(width=64, hidden=128, vocab=192)  # whole blocks in every matrix
    half = jshard.Precision(
        gather="float16", compute="float32", reduce="float16", sum="float32"
    )
    named = {"precision": half}
    policy = jshard.Policy(
        precision=jshard.Precision(gather=dtype),
        overrides={"head": named, "blocks.up*": named},
        accumulate=2,
    )
    found, elements = step_collectives(policy, replica=2, sizes=sizes)
    matrices = {name: n * runs(name) for name, n in elements.items() if n >= 4096}
    assert all(n % (4 * BLOCK) == 0 for n in matrices.values())
    halves, in_bytes = {"head.kernel", "blocks.up.kernel"}, {"blocks.down.kernel"}
    assert matrices.keys() == halves | in_bytes
    of_half, of_bytes = (
        sum(matrices[name] for name in names) for names in (halves, in_bytes)
    )
    # In each of the two micro-batches forward and backward, with a scale a block.
    assert wire(found, "all-gather") == {
        (4, "f16"): 2 * 2 * 2 * of_half * 3 // 4,
        (4, "s8"): 2 * 2 * of_bytes * 3 // 4,
        (4, "f32"): 2 * 2 * 4 * of_bytes // BLOCK * 3 // 4,
    }
    # Gradients travel as they are, but for sums in another dtype than the wire's.
    assert wire(found, "reduce-scatter") == {(4, "f32"): 2 * 4 * of_bytes * 3 // 4}
    assert wire(found, "all-to-all") == {(4, "f16"): 2 * 2 * of_half * 3 // 4}
    exchanges = [c for c in found if c.kind == "all-to-all"]
    assert sum(c.times for c in exchanges) == 2 * sum(map(runs, halves))
    # Replicated parameters are only all-reduced: all accumulated gradients travel once.
    whole = sum(n * runs(name) for name, n in elements.items() if name not in matrices)
    total = of_half + of_bytes + sizes.vocab * sizes.width
    reduced: Counter = Counter()
    for (kind, devices, size), times in counted(found).items():
        reduced[devices] += size * times * (kind == "all-reduce")
    assert +reduced == {8: whole, 2: total // 4}
    # Over replicas the sums go as they are, the embedding's, too.
    assert wire(found, "all-reduce")[2, "f32"] == 4 * total // 4


@pytest.mark.slow  # test_sums.py has the parts alone
def test_groups_keep_and_gather_weights_in_the_dtype_of_the_wire():
    half = jshard.Precision(gather="float16", compute="float32")
    policy = policies(precision=half, reshard_after_forward=2)
    found, _ = step_collectives(policy)
    assert {key[1] for key in wire(found, "all-gather")} == {"f16"}

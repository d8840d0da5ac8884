"""Into which blocks attention is cut, and what it leaves out: read from its program."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jshard.nn.attention import _obstacle
from jshard.nn.blockwise_attention import Scores, blockwise_attention
from jshard.plan import GPUS, tracing_for


def blocks(T: int, S: int, block: int | None = None, **scores: Any) -> list[tuple]:
    """Of each range of queries: its blocks, the queries of one, and their keys."""
    q, k = (jax.ShapeDtypeStruct((1, n, 1, 4), jnp.float32) for n in (T, S))
    attend = lambda q, k: blockwise_attention(
        q, k, k, None, Scores(1.0, **scores), block
    )
    scans = [x for x in jax.make_jaxpr(attend)(q, k).eqns if x.primitive.name == "scan"]
    found = []
    for scan in scans:
        (one,) = scan.params["jaxpr"].eqns
        product = next(
            x for x in one.params["jaxpr"].eqns if x.primitive.name == "dot_general"
        )
        keys, queries = (x.aval.shape[1] for x in product.invars)
        found.append((scan.params["length"], queries, keys))
    return found


@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ({}, [(10, 1, 10)]),
        ({"is_causal": True}, [(3, 1, 3), (3, 1, 6), (3, 1, 9), (1, 1, 10)]),
        # From the key before a range's first query on.
        (
            {"is_causal": True, "window": 2},
            [(3, 1, 3), (3, 1, 4), (3, 1, 4), (1, 1, 2)],
        ),
        ({"is_causal": True, "window": 1}, [(3, 1, 3)] * 3 + [(1, 1, 1)]),
    ],
)
def test_what_causality_and_windows_hide_of_a_range_is_left_out(scores, want):
    assert blocks(10, 10, 1, **scores) == want


def test_a_block_has_the_queries_that_there_is_room_for_and_at_least_64():
    assert blocks(256, 2**14) == [(2, 128, 2**14)]
    assert blocks(130, 2**17) == [(3, 64, 2**17)]
    assert blocks(5, 5) == [(1, 5, 5)]
    assert blocks(5, 5, 2) == [(3, 2, 5)]


@pytest.mark.parametrize(("rows", "fits"), [(2**12 - 1, True), (2**12, False)])
def test_cudnn_attends_fewer_than_2_to_the_31_elements_of_packed_rows(rows, fits):
    q = jax.ShapeDtypeStruct((rows, 2**9, 2**4, 2**6), jnp.bfloat16)
    with tracing_for(GPUS["h100"]):
        why = _obstacle(q, True, 4, Scores(1.0), "gpu", "H100")
        assert _obstacle(q, False, None, Scores(1.0), "gpu", "H100") is None
    assert why is None if fits else "fewer than 2**31 elements" in str(why)

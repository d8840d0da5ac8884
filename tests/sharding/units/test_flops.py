"""What the backward computes again: exact products of each remat policy.

Of a layer's matrix products, all run once forward, and two of as many operations each
run backward. What is computed again is what the backward reads and remat did not keep.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import hlo
import jshard
from decoder import Sizes, lower_step, make_fsdp, policies
from jshard.models.gpt import GPT, GPTConfig

SIZES = Sizes(layers=3)  # a decoder without attention
EXAMPLES = 2  # a device
CONFIG = GPTConfig(
    vocab_size=72,
    sequence_length=6,
    num_layers=5,
    num_heads=2,
    width=16,
    loss_chunk=4,
)


def products() -> dict[str, int]:
    """Operations of each product of a block of the GPT, for a device's examples."""
    D, T = CONFIG.width, CONFIG.sequence_length
    weights = {"qkv": 3 * D, "out": D, "up": 4 * D, "down": 4 * D}
    attention = {"scores": T, "values": T}
    return {
        name: 2 * EXAMPLES * T * D * size
        for name, size in (weights | attention).items()
    }


def gpt_flops(training: bool = True, **knobs: Any) -> tuple[int, int]:
    """(Operations of all blocks, those of the head) in a step on one device."""
    fsdp, optimizer = jshard.FSDP(jshard.make_mesh(), policies(**knobs)), optax.sgd(0.1)
    state = fsdp.abstract_state(lambda rngs: GPT(CONFIG, rngs=rngs), optimizer)
    shape = (8 * EXAMPLES, CONFIG.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32)
    loss_fn = lambda model, batch: model.loss(*batch)
    step = fsdp.train_step(loss_fn, optimizer) if training else fsdp.eval_step(loss_fn)
    lowered = step.lower(state, (tokens, tokens, weights))
    return split(hlo.dots(hlo.compile(lowered).as_text()), CONFIG.vocab_size)


def split(found: list[hlo.Dot], vocabulary: int) -> tuple[int, int]:
    """Operations of products without and with the vocabulary as a dimension."""
    flops = [0, 0]
    for dot in found:
        shapes = [array.shape for array in (*dot.operands, dot.result)]
        flops[any(vocabulary in shape for shape in shapes)] += dot.flops
    return flops[0], flops[1]


# What the backward of a block computes again. Never the last product, "down": nothing
# reads it but the next layer, whose input is kept.
AGAIN: dict[str, tuple[Any, set[str]]] = {
    "none": ("none", set()),
    # Products of activations, for the gradients of their factors, and their results
    # where a weight's gradient reads them.
    "dots": ("dots", {"scores", "values"}),
    "full": ("full", {"qkv", "scores", "values", "out", "up"}),
    # "out" is in the residual stream, which "up" reads.
    "names": (jshard.Names("qkv", "attended", "hidden"), {"scores", "out"}),
    "attended": (jshard.Names("attended"), {"qkv", "scores", "out", "up"}),
    "hidden": (jshard.Names("hidden"), {"qkv", "scores", "values", "out"}),
    "everything": (jax.checkpoint_policies.everything_saveable, set()),
}


# By default the decoder below: of attention's products no policy knows more.
@pytest.mark.slow
@pytest.mark.parametrize("remat", AGAIN)
def test_the_backward_computes_again_what_remat_did_not_keep(remat):
    policy, again = AGAIN[remat]
    size = products()
    forward, more = sum(size.values()), sum(size[name] for name in again)
    blocks, head = gpt_flops(remat=policy)
    assert blocks == CONFIG.num_layers * (3 * forward + more)
    check_head(head)


def check_head(flops: int) -> None:
    # The logits, and both gradients of them, which are made with the loss.
    T, D, V = CONFIG.sequence_length, CONFIG.width, CONFIG.vocab_size
    assert flops == 3 * 2 * EXAMPLES * T * D * V


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_k", "remat"),
    [
        (2, "full"),
        pytest.param(4, jshard.Names("attended"), marks=pytest.mark.slow),
        pytest.param(0, "full", marks=pytest.mark.slow),
        pytest.param(5, "full", marks=pytest.mark.slow),
    ],
)
def test_only_the_first_k_layers_compute_again(first_k, remat):
    size = products()
    again = AGAIN["full" if remat == "full" else "attended"][1]
    forward, more = sum(size.values()), sum(size[name] for name in again)
    blocks, head = gpt_flops(remat=remat, first_k=first_k)
    assert blocks == CONFIG.num_layers * 3 * forward + first_k * more
    check_head(head)


def test_evaluation_computes_every_product_once():
    blocks, head = gpt_flops(training=False)
    assert blocks == CONFIG.num_layers * sum(products().values())
    T, D, V = CONFIG.sequence_length, CONFIG.width, CONFIG.vocab_size
    assert head == 2 * EXAMPLES * T * D * V


# A layer whose products are all with weights: "dots" computes none again. What is named
# behind an activation function, as "hidden" is here, saves no product: the derivative
# of the function reads what stands before it.
# (By default test_residuals.py reads what "full" keeps of a layer.)
@pytest.mark.quick("dots-0-False")
@pytest.mark.parametrize(
    ("remat", "again", "plain"),
    [
        ("dots", 0, False),
        ("full", 1, True),
        ("dots", 0, True),
        ("full", 1, False),
        (jshard.Names("hidden"), 1, False),
        (jshard.Names("hidden"), 1, True),
        ("none", 0, False),
        ("none", 0, True),
    ],
    ids=str,
)
def test_products_with_weights_alone_are_computed_again_by_full_remat(
    remat, again, plain
):
    lowered, _ = lower_step(
        make_fsdp(policies(remat=remat), plain=plain),
        SIZES,
        plain=plain,
        examples=8 * EXAMPLES,
        optimizer=optax.sgd(0.1),
    )
    blocks, head = split(hlo.dots(hlo.compile(lowered).as_text()), SIZES.vocab)
    tokens = EXAMPLES * SIZES.length
    up = 2 * tokens * SIZES.width * SIZES.hidden  # and as many for "down"
    assert blocks == SIZES.layers * (3 * 2 * up + again * up)
    assert head == 3 * 2 * tokens * SIZES.width * SIZES.vocab

"""What only a GPU's program shows, compiled for absent H100s."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import hlo
import jshard
from decoder import Sizes, loss_fn, make_decoder
from h100 import h100s
from jshard.models.llama import Llama, LlamaConfig
from jshard.plan import GPUS as KINDS
from jshard.plan import compile_for, tracing_for
from jshard.sharding.settings.mesh import BATCH

pytestmark = pytest.mark.h100

GPUS, EXAMPLES = 8, 4  # examples a GPU
SIZES = Sizes(layers=16, width=256, hidden=1024, vocab=64, length=128)


def compiled(policy: jshard.Policy, layers: int = SIZES.layers) -> Any:
    """A step of the decoder, for eight H100s."""
    mesh = h100s(GPUS)
    fsdp, optimizer = jshard.FSDP(mesh, policy), optax.adamw(1e-3)
    sizes = dataclasses.replace(SIZES, layers=layers)
    state = fsdp.abstract_state(make_decoder(sizes), optimizer)
    sharding = NamedSharding(mesh, BATCH)
    shape = (GPUS * EXAMPLES, SIZES.length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    step = fsdp.train_step(loss_fn, optimizer)
    return step.lower(state, {"tokens": tokens, "targets": tokens}).compile()


def test_offloaded_activations_wait_in_host_memory_and_nothing_else_does():
    kept, offloaded = (
        compiled(jshard.Policy(remat=remat("hidden"))).memory_analysis()
        for remat in (jshard.Names, jshard.Offload)
    )
    layer = EXAMPLES * SIZES.length * SIZES.hidden * 4
    activations = SIZES.layers * layer
    assert kept.host_temp_size_in_bytes == 0
    # The last layer's are read at once: XLA leaves them where they are.
    assert offloaded.host_temp_size_in_bytes == activations - layer
    saved = kept.temp_size_in_bytes - offloaded.temp_size_in_bytes
    # All of them but those of a layer that comes and one that goes.
    assert activations * (1 - 4 / SIZES.layers) < saved < activations * 1.1


def test_unroll_does_not_keep_offloaded_activations_on_the_device():
    policy = jshard.Policy(remat=jshard.Offload("hidden"), unroll=True)
    layer = EXAMPLES * SIZES.length * SIZES.hidden * 4
    on_host = compiled(policy).memory_analysis().host_temp_size_in_bytes
    assert on_host == (SIZES.layers - 1) * layer


def test_the_inputs_of_layers_wait_in_host_memory_if_they_are_named():
    without, offloaded = (
        compiled(jshard.Policy(remat=remat)).memory_analysis()
        for remat in ("full", jshard.Offload("inputs"))
    )
    stream = EXAMPLES * SIZES.length * SIZES.width * 4
    assert without.host_temp_size_in_bytes == 0
    assert offloaded.host_temp_size_in_bytes == (SIZES.layers - 1) * stream
    assert offloaded.temp_size_in_bytes < without.temp_size_in_bytes


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"remat": "dots", "first_k": 4, "reshard_root": True},
        {"accumulate": 2, "reshard_after_forward": 2},
    ],
)
def test_a_gpu_updates_its_state_in_place_and_copies_no_whole_shard(knobs):
    step = compiled(jshard.Policy(min_shard_elements=0, **knobs))
    memory = step.memory_analysis()
    # All but the batch; the metrics are new.
    batch = 2 * EXAMPLES * SIZES.length * 4
    assert memory.alias_size_in_bytes == memory.argument_size_in_bytes - batch
    size = SIZES.layers * SIZES.width * SIZES.hidden // GPUS  # of a Stack's shard
    copied = [x.shape for x, _ in hlo.copies(step.as_text()) if x.size == size]
    # Activations have a dimension of examples.
    assert not [shape for shape in copied if EXAMPLES not in shape]


def llama_text(policy: jshard.Policy, kind: str = "h100", **sizes: Any) -> str:
    """The compiled step of a small Llama, for eight GPUs; one sequence each."""
    config = LlamaConfig(vocab_size=64, **sizes)
    mesh, optimizer = h100s(GPUS, kind=kind), optax.adam(1e-3)
    traced_on: Any = mesh.abstract_mesh if policy.offload else mesh
    fsdp = jshard.FSDP(traced_on, policy)
    state = fsdp.abstract_state(lambda rngs: Llama(config, rngs=rngs), optimizer)
    sharding = NamedSharding(traced_on, BATCH)
    shape = (GPUS, config.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    step = fsdp.train_step(
        lambda model, batch: model.loss(batch["x"], batch["x"], batch["w"]), optimizer
    )
    with tracing_for(KINDS[kind]):
        traced = step.trace(state, {"x": tokens, "w": weights})
    program = compile_for(mesh, traced) if policy.offload else traced.lower().compile()
    return program.as_text() or ""


@pytest.mark.parametrize(
    ("attention", "offload"), [("auto", None), ("auto", "optimizer"), ("xla", None)]
)
def test_a_bf16_llama_attends_by_cudnn_forward_and_backward(attention, offload):
    precision = jshard.Precision(compute="bfloat16")
    policy = jshard.Policy(precision=precision, offload=offload)
    text = llama_text(
        policy, sequence_length=128, num_layers=1, num_heads=4, num_kv_heads=2,
        width=128, hidden=256, loss_chunk=128, attention=attention,
    )  # fmt: skip
    flash = {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    calls = set(re.findall(r'custom_call_target="(__cudnn[^"]*)"', text))
    assert calls == (set() if attention == "xla" else flash)


@pytest.mark.parametrize(("remat", "times"), [("full", 2), ("attention", 1)])
def test_attention_that_is_kept_is_not_computed_again(remat, times):
    policy = jshard.Policy(remat=remat, precision=jshard.Precision(compute="bfloat16"))
    text = llama_text(
        policy, sequence_length=128, num_layers=4, num_heads=4, num_kv_heads=2,
        width=128, hidden=256, loss_chunk=128,
    )  # fmt: skip
    calls = hlo.calls(text)
    assert calls["__cudnn$fmhaSoftmax"] == 4 * times
    assert calls["__cudnn$fmhaSoftmaxBackward"] == 4


# A Llama layer has 7 products with weights, each with 2 in the backward. Of those in
# the forward, full remat repeats all but the last, whose result nothing reads.
@pytest.mark.parametrize(("remat", "a_layer"), [("dots", 21), ("full", 27)])
@pytest.mark.parametrize(
    ("products", "kind", "target"),
    [
        ("float8", "h100", "__cublas$lt$matmul$f8"),
        ("mxfp8", "b200", "__cudnn$blockScaledDot"),
        ("mxfp8", "gb300", "__cudnn$blockScaledDot"),
        ("nvfp4", "b200", "__cudnn$blockScaledDot"),
        ("nvfp4", "gb300", "__cudnn$blockScaledDot"),
    ],
)
def test_all_products_of_a_layer_are_the_library_s_float8_ones(
    products, kind, target, remat, a_layer
):
    layers, width, hidden = 5, 256, 512
    precision = jshard.Precision(compute="bfloat16", products=products)
    policy = jshard.Policy(remat=remat, precision=precision, min_shard_elements=0)
    text = llama_text(
        policy, kind, sequence_length=256, num_layers=layers, num_heads=2,
        num_kv_heads=1, width=width, hidden=hidden, loss_chunk=256,
    )  # fmt: skip
    calls = hlo.calls(text)
    assert calls.pop(target) == layers * a_layer
    others = {x: n for x, n in calls.items() if "gemm" in x or "matmul" in x}
    four_bits = products == "nvfp4"
    # The head's, and the rotations of 4 inputs and 7 gradients.
    assert sum(others.values()) == 3 + (11 * layers if four_bits else 0)
    if products != "float8":
        multiplied = "f4e2m1fn" if four_bits else "f8e4m3fn"
        assert hlo.dtypes_of(text, target) == {multiplied}
    # Weights are gathered in bytes, or two a byte, and nothing dequantizes them.
    matrices = 2 * width**2 + 2 * width * width // 2 + 3 * width * hidden
    gathered = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    in_bytes = [
        (a.size, c.times) for c in gathered for a in c.results if a.bytes == a.size
    ]
    # With prefetch the backward begins with the last layer's weights.
    arrived = (2 * layers - 1) * matrices // (2 if four_bits else 1)
    assert sum(size * times for size, times in in_bytes) == arrived
    # Scales of blocks: one all-reduce of a byte for each 32 x 32 or 16 x 16 weights. Of
    # four bits one more, of a byte for each of the 7 weights.
    summed = [c for c in hlo.collectives(text) if c.kind == "all-reduce"]
    scales = sum(a.size for c in summed for a in c.results if a.dtype == "u8")
    of_blocks = {"mxfp8": matrices // 1024, "nvfp4": matrices // 256 + 7}
    assert scales == layers * of_blocks.get(products, 0)

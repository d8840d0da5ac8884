"""Windows, soft caps, packed documents, scales and grouped heads of attention."""

import functools
import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import jshard
from jshard.nn import attention, blockwise_attention
from jshard.nn.attention import documents, starts_and_lengths
from jshard.plan import GPUS, tracing_for
from jshard.plan.start_up import attention_kernels, describe

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")


_ONE_MORE = [(0, 0), (0, 1), (0, 0), (0, 0)]  # keys


def reference(
    q,
    k,
    v,
    *,
    is_causal,
    segment_ids_BT=None,
    window=None,
    soft_cap=None,
    scale=None,
    sinks_N=None,
):
    """The definition, with all scores; a document is a run of equal ids."""
    B, T, N, H = q.shape
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (scale or 1 / math.sqrt(H))
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    t, s = np.arange(T)[:, None], np.arange(k.shape[1])
    mask = np.ones((B, T, k.shape[1]), bool)
    if is_causal:
        mask &= s <= t
    if window is not None:
        mask &= s > t - window
    if segment_ids_BT is not None:
        ids = np.asarray(segment_ids_BT)
        number = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
        mask &= number[:, :, None] == number[:, None]
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N[:, None, None], (B, N, T, 1))
        scores, v = jnp.concatenate([scores, sinks], -1), jnp.pad(v, _ONE_MORE)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@st.composite
def calls(draw):
    """Shapes (B, T, S, N, K, H) and options, with ragged documents."""
    T, K, G = draw(st.integers(1, 9)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    is_causal = draw(st.booleans())
    options: dict[str, Any] = {"is_causal": is_causal}
    if is_causal and draw(st.booleans()):
        options["window"] = draw(st.integers(1, T + 1))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.3, 1.0, 2.0]))
    S = T
    if draw(st.booleans()):
        ids = st.lists(st.integers(0, 3), min_size=T, max_size=T)
        rows = draw(st.lists(ids, min_size=2, max_size=2))
        options["segment_ids_BT"] = np.array(rows, np.int32)
    elif not is_causal:
        S = draw(st.integers(1, 9))
    return (2, T, S, K * G, K, 4), options


def arrays(shapes: tuple[int, ...]) -> list[jax.Array]:
    B, T, S, N, K, H = shapes
    rng = np.random.default_rng(0)
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return [jax.device_put(rng.standard_normal(size)) for size in sizes]


def compare(
    attend: Any, shapes: tuple[int, ...], options: dict[str, Any], bound: float = 1e-12
) -> None:
    """Compares values and gradients with the reference's, in float64."""

    def loss(attend, *inputs):
        out = attend(*inputs, **options)
        return jnp.sum(jnp.sin(out)), out

    both = jax.value_and_grad(loss, argnums=(1, 2, 3), has_aux=True)
    both, inputs = jax.jit(both, static_argnums=0), arrays(shapes)
    (_, got), got_grads = both(attend, *inputs)
    (_, want), want_grads = both(reference, *inputs)
    for g, w in zip((got, *got_grads), (want, *want_grads), strict=True):
        assert g.dtype == np.float64
        np.testing.assert_allclose(g, w, rtol=0, atol=bound)


def check_blocks(
    call: tuple[tuple[int, ...], dict[str, Any]], soft_cap: float | None, block: int
) -> None:
    shapes, options = call
    smaller = functools.partial(blockwise_attention.blockwise_attention, block=block)
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "blockwise_attention", smaller)
        attend = functools.partial(
            jshard.nn.dot_product_attention, implementation="blockwise"
        )
        compare(attend, shapes, options | {"soft_cap": soft_cap})


@pytest.mark.slow
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(calls(), st.sampled_from([None, 0.7, 5.0]), st.integers(1, 4))
def test_blockwise_attention_is_the_definition_in_any_case(call, soft_cap, block):
    check_blocks(call, soft_cap, block)


IDS = np.array([[1, 1, 0, 0, 0, 1, 1], [2, 2, 2, 2, 2, 2, 2]])


@pytest.mark.quick("shapes1", "shapes3", "shapes4")
@pytest.mark.parametrize(
    ("shapes", "options", "soft_cap", "block"),
    [
        ((2, 7, 7, 6, 2, 4), {"is_causal": True}, None, 3),
        ((2, 7, 7, 4, 1, 4), {"is_causal": True, "window": 3, "scale": 0.3}, 0.7, 2),
        ((2, 7, 7, 2, 2, 4), {"is_causal": True, "segment_ids_BT": IDS}, 5.0, 3),
        ((2, 7, 7, 2, 1, 4), {"is_causal": False, "segment_ids_BT": IDS}, None, 2),
        ((2, 5, 8, 2, 1, 4), {"is_causal": False}, 0.7, 4),
        # The last block of keys is filled up, and no causality hides the filling.
        ((2, 4, 7, 2, 1, 4), {"is_causal": False}, None, 3),
    ],
)
def test_blockwise_attention_is_the_definition(shapes, options, soft_cap, block):
    check_blocks((shapes, options), soft_cap, block)


@pytest.mark.parametrize(
    "options",
    [{"window": 3, "scale": 0.3}, {"segment_ids_BT": IDS}],
)
def test_xlas_attention_is_the_definition(options):
    with jax.enable_x64(True):
        # JAX's softmax is in float32.
        attend = jshard.nn.dot_product_attention
        options = options | {"is_causal": True}
        compare(attend, (2, 7, 7, 4, 2, 4), options, bound=1e-5)


def test_a_row_with_more_documents_than_stated_is_nan_and_others_are_not():
    q, k, v = arrays((2, 4, 4, 2, 1, 4))
    ids = jnp.array([[0, 1, 0, 0], [5, 5, 7, 7]])
    for implementation in ("xla", "blockwise"):
        attend = functools.partial(
            jshard.nn.dot_product_attention, implementation=implementation
        )
        run = jax.jit(attend, static_argnames="max_segments")
        out = run(q, k, v, segment_ids_BT=ids, max_segments=2)
        assert jnp.isnan(out[0]).all()
        assert jnp.isfinite(out[1]).all()


def test_documents_are_runs_and_have_starts_and_lengths():
    ids = jnp.array([[3, 3, 1, 3], [0, 0, 0, 0], [1, 2, 3, 4]])
    number_BT = documents(ids)
    assert number_BT.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 2, 3]]
    starts, lengths = starts_and_lengths(number_BT, 4)
    rows = [[0, 2, 3, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, -1]]
    assert starts.tolist() == rows
    assert lengths.tolist() == [[2, 1, 1, -1], [4, -1, -1, -1], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0, "is_causal": True}, "window=0 must be at least 1"),
        ({"window": 4}, "window=4 must be at least 1, with is_causal=True"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"max_segments": 2}, "max_segments=2 must be at least 1, with segment ids"),
        ({"soft_cap": 1.0, "implementation": "xla"}, "'xla' has no soft cap; use"),
        ({"sinks_N": jnp.ones(2), "implementation": "xla"}, "'xla' has no sinks; use"),
        ({"segment_ids_BT": jnp.zeros((2, 3), int)}, r"are int32\[2, 3\]; .* \[2, 4\]"),
        ({"segment_ids_BT": jnp.zeros((2, 4))}, r"are float32\[2, 4\]; queries"),
    ],
)
def test_options_without_a_meaning_are_one_clear_line(options, why):
    q, k, v = arrays((2, 4, 4, 2, 1, 4))
    with pytest.raises(jshard.UserError, match=f"^attention.*{why}"):
        jshard.nn.dot_product_attention(q, k, v, **options)


@pytest.mark.slow  # parallel/test_one_device.py has sinks
@pytest.mark.parametrize("kernel", ["auto", "blockwise"])
def test_sinks_have_a_part_of_each_heads_weights(x64, kernel, monkeypatch):
    monkeypatch.setattr(blockwise_attention, "SCORES", 1)
    rng = np.random.default_rng(0)
    T, shapes = 70, (4, 2, 2)  # two blocks
    inputs = [jax.device_put(rng.standard_normal((2, T, n, 4))) for n in shapes]
    inputs.append(jax.device_put(rng.standard_normal(4)))
    out = rng.standard_normal((2, T, 4, 4))
    ids = np.sort(rng.integers(0, 3, (2, T)), axis=1)
    options: dict[str, Any] = {"is_causal": True, "window": 9, "segment_ids_BT": ids}

    def run(attend):
        def loss(q, k, v, sinks_N):
            return jnp.sum(out * attend(q, k, v, sinks_N=sinks_N, **options))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*inputs)

    defined = functools.partial(jshard.nn.dot_product_attention, implementation=kernel)
    for got, want in zip(
        *map(jax.tree.leaves, map(run, (defined, reference))), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11)


def test_segment_ids_need_as_many_keys_as_queries():
    q, k, v = arrays((2, 4, 6, 2, 1, 4))
    with pytest.raises(jshard.UserError, match="need as many keys as queries, not 6"):
        jshard.nn.dot_product_attention(q, k, v, segment_ids_BT=jnp.zeros((2, 4), int))


# The kernel that a GPU gets.


def kernels(
    tokens: int = 2048,
    width: int = 64,
    dtype: Any = jnp.bfloat16,
    gpu: str = "h100",
    **options: Any,
) -> list[str]:
    """The kernels of a program for a GPU, forward and backward, in words."""
    device = AbstractDevice(GPUS[gpu].name, GPUS[gpu].cores, "gpu")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((8,), ("fsdp",), auto, abstract_device=device)
    spec = PartitionSpec("fsdp")
    ids = options.pop("ids", False)

    def grad(q, ids_BT):
        more = {"segment_ids_BT": ids_BT} if ids else {}

        def loss(q):
            k = q[:, :, :1]
            out = jshard.nn.dot_product_attention(
                q, k, k, is_causal=True, **options, **more
            )
            return jnp.sum(out.astype(jnp.float32))

        return jax.grad(loss)(q)

    run = jax.shard_map(
        grad, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    q = jax.ShapeDtypeStruct((8, tokens, 4, width), dtype)
    with tracing_for(GPUS[gpu]):
        jaxpr = jax.make_jaxpr(run)(q, jax.ShapeDtypeStruct(q.shape[:2], jnp.int32))
    return attention_kernels(jaxpr.jaxpr)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 512},
        {"scale": 0.1, "width": 256},
        {"ids": True, "max_segments": 16},
        {"ids": True, "max_segments": 1, "window": 512, "scale": 0.1},
        {"gpu": "a100", "window": 512},
    ],
)
def test_what_cudnn_can_do_is_done_by_cudnn(options):
    assert kernels(**options) == ["cuDNN's flash attention"]


@pytest.mark.quick("options0", "options2")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"soft_cap": 50.0}, "has no soft cap"),
        ({"dtype": jnp.float32}, "needs bfloat16 or float16, not float32"),
        ({"ids": True}, "needs max_segments, the most documents of a row"),
        ({"ids": True, "max_segments": 4, "gpu": "a100"}, "needs compute capability 9"),
        ({"width": 256, "gpu": "b200"}, "needs a head width .* not 256"),
    ],
)
def test_long_rows_without_cudnn_are_attended_in_blocks_with_a_warning(options, why):
    with pytest.warns(UserWarning, match=f"slower than cuDNN's .*, which {why}"):
        assert kernels(**options) == ["XLA's, block by block"]
    if "soft_cap" not in options:
        short = kernels(tokens=1024, **options)
        assert short == ["XLA's, which stores the scores of all pairs"]


def test_a_kernel_that_was_asked_for_is_no_warning():
    assert kernels(implementation="xla") == [attention.KERNELS["xla-attention"]]
    assert kernels(implementation="blockwise") == ["XLA's, block by block"]
    with pytest.raises(jshard.UserError, match="attention 'cudnn' has no soft cap; us"):
        kernels(implementation="cudnn", soft_cap=1.0)


# In a step.


class Layer(nnx.Module):
    def __init__(self, rngs, **options):
        self.qkv = nnx.Linear(8, 16, param_dtype=float, rngs=rngs)
        self.out = nnx.Linear(8, 8, param_dtype=float, rngs=rngs)
        self.options = options

    def __call__(self, x, ids_BT):
        q, k, v = jnp.split(self.qkv(x), (8, 12), axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], -1, 4) for y in (q, k, v))
        y = jshard.nn.dot_product_attention(
            q, k, v, is_causal=True, segment_ids_BT=ids_BT, **self.options
        )
        return x + self.out(y.reshape(x.shape))


class Model(nnx.Module):
    def __init__(self, rngs, **options):
        self.layers = jshard.Stack(lambda rngs: Layer(rngs, **options), 2, rngs=rngs)

    def __call__(self, batch):
        return self.layers(batch["x"], batch["ids"])


def loss_fn(model, batch):
    return jshard.Mean(jnp.sum(jnp.sin(model(batch))), batch["x"].size)


# By default tests/sharding/axes/test_context.py trains models that attend in blocks.
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_blocks_in_a_sharded_step_follow_one_device_and_the_definition(
    remat, monkeypatch
):
    smaller = functools.partial(blockwise_attention.blockwise_attention, block=2)
    monkeypatch.setattr(attention, "blockwise_attention", smaller)
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.random((8, 5)) < 0.4, axis=1)
    batch = {"x": rng.standard_normal((8, 5, 8)), "ids": ids}
    options = {"soft_cap": 2.0, "window": 3, "scale": 0.7, "max_segments": 5}
    make = lambda rngs: Model(rngs, **options)
    policy = jshard.Policy(min_shard_elements=0, remat=remat, prefetch=True)
    fsdp = jshard.FSDP(jshard.make_mesh(replica=2), policy)
    state = fsdp.init(make, optax.sgd(0.1))
    params, graphdef = fsdp.fetch(state.params), state.graphdef
    step = fsdp.train_step(loss_fn, optax.sgd(0.1))
    note = describe(fsdp, state, batch, step)
    assert "\nattention       XLA's, block by block" in note
    state, metrics = step(state, fsdp.shard_batch(batch))

    def defined(q, k, v, **options):
        options.pop("max_segments")
        return reference(q, k, v, **options)

    monkeypatch.setattr(jshard.nn, "dot_product_attention", defined)

    def loss(params):
        mean = loss_fn(nnx.merge(graphdef, params, copy=True), batch)
        return mean.total / mean.count

    value, grads = jax.value_and_grad(loss)(params)
    after = jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), params, grads)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
        fsdp.fetch(state.params),
        after,
    )

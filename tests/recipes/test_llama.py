"""models/llama.py against a plain float64 implementation, and its recipes' sizes."""

import dataclasses
import functools
import json
import subprocess
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard
import parity
from filled import filled
from jshard import inspect
from jshard.models.llama import Llama, LlamaConfig
from jshard.models.rope import Rope, rotate_by
from jshard.recipe.load import find_recipe, open_recipe
from jshard.recipes import llama
from jshard.storage.checkpoint.step_folders import step_folder

SMALL = {
    "vocab_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "width": 16,
    "hidden": 24,
    "rope_theta": 100.0,
    "loss_chunk": 8,
}


def attention(
    q_BTNH, k_BTKH, v_BTKH, *, scale: float, is_causal: bool, implementation: str
) -> jax.Array:
    """Head by head, in the dtype of its inputs (JAX's has its softmax in float32)."""
    assert is_causal
    assert implementation == "xla"
    T, N, _ = q_BTNH.shape[1:]
    group = N // k_BTKH.shape[2]
    heads = []
    for n in range(N):
        q_BTH, k_BTH = q_BTNH[:, :, n], k_BTKH[:, :, n // group]
        scores_BTS = q_BTH @ k_BTH.swapaxes(1, 2) * scale
        scores_BTS = jnp.where(jnp.tri(T, dtype=bool), scores_BTS, -jnp.inf)
        heads.append(jax.nn.softmax(scores_BTS) @ v_BTKH[:, :, n // group])
    return jnp.stack(heads, axis=2)


@functools.partial(jax.jit, static_argnums=1)
def rotate(x_BTNH: jax.Array, theta: float, positions: Any = None) -> jax.Array:
    wide = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    frequency_I = Rope(theta).frequencies(x_BTNH.shape[3], wide)
    return rotate_by(x_BTNH, frequency_I, positions)


def plain_rotate(x_BTNH: jax.Array, theta: float) -> jax.Array:
    """Pairs of dimensions as complex numbers, turned."""
    T, H = x_BTNH.shape[1], x_BTNH.shape[3]
    z_BTNI = x_BTNH[..., : H // 2] + 1j * x_BTNH[..., H // 2 :]
    angles_TI = np.outer(np.arange(T), theta ** (-2 * np.arange(H // 2) / H))
    z_BTNI = z_BTNI * np.exp(1j * angles_TI)[:, None]
    return jnp.concatenate([z_BTNI.real, z_BTNI.imag], axis=-1)


def plain_logits(params: Any, config: LlamaConfig, tokens_BT: jax.Array) -> jax.Array:
    """The model over a nested dict of its parameters, without Flax."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.norm_eps) * scale

    def heads(x: jax.Array, number: int) -> jax.Array:
        return x.reshape(*tokens_BT.shape, number, config.width // config.num_heads)

    x = params["embed"]["embedding"][tokens_BT]
    for i in range(config.num_layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        h, weights = norm(x, block["norm1"]["scale"]), block["attention"]
        q = heads(h @ weights["q"]["kernel"], config.num_heads)
        k = heads(h @ weights["k"]["kernel"], config.num_kv_heads)
        v = heads(h @ weights["v"]["kernel"], config.num_kv_heads)
        theta = config.rope_theta
        y = attention(
            plain_rotate(q, theta),
            plain_rotate(k, theta),
            v,
            scale=q.shape[-1] ** -0.5,
            is_causal=True,
            implementation="xla",
        )
        x = x + y.reshape(x.shape) @ weights["out"]["kernel"]
        h = norm(x, block["norm2"]["scale"])
        gate, up = h @ block["gate"]["kernel"], h @ block["up"]["kernel"]
        x = x + (gate / (1 + jnp.exp(-gate)) * up) @ block["down"]["kernel"]
    head = params["embed"]["embedding"].T if config.tied else params["head"]["kernel"]
    return norm(x, params["norm"]["scale"]) @ head


def relative(got: Any, want: Any) -> float:
    errors = jax.tree.map(parity.error, got, want)
    return max(jax.tree.leaves(errors))


@pytest.mark.quick("True-True")
@pytest.mark.parametrize(("tied", "softmax_in_float32"), [(False, False), (True, True)])
def test_logits_and_gradients_are_those_of_a_plain_implementation(
    x64, monkeypatch, tied, softmax_in_float32
):
    if not softmax_in_float32:
        monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    config = LlamaConfig(**SMALL, tied=tied, dtype=jnp.float64, param_dtype=jnp.float64)
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 40, (2, 3, 7))
    weights = jax.device_put(rng.random((3, 7)))
    # Larger than at the start, so that scores and gates differ.
    graphdef, params = nnx.split(
        filled(lambda: Llama(config, rngs=nnx.Rngs(0)), spread=0.2)
    )

    def model_loss(params):
        model = nnx.merge(graphdef, params)
        mean = model.loss(tokens, targets, weights)
        assert isinstance(mean, jshard.Mean)
        return mean.total, model(tokens)

    def plain_loss(params):
        logits = plain_logits(params, config, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(weights * losses), logits

    grads, logits = jax.jit(jax.grad(model_loss, has_aux=True))(params)
    want = jax.jit(jax.grad(plain_loss, has_aux=True))(nnx.to_pure_dict(params))
    bound = 1e-6 if softmax_in_float32 else 1e-9
    assert relative((nnx.to_pure_dict(grads), logits), want) <= bound


def test_positions_of_packed_documents_begin_again_with_each(x64):
    x_BTNH = np.random.default_rng(0).normal(size=(2, 6, 3, 4))
    positions = jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]])
    turned = rotate(x_BTNH, 100.0, positions)
    want = rotate(x_BTNH, 100.0)
    np.testing.assert_array_equal(turned[0], want[0])
    np.testing.assert_array_equal(turned[1, :2], want[1, :2])
    np.testing.assert_array_equal(turned[1, 2:], rotate(x_BTNH[:, 2:], 100.0)[1])


def test_rotated_scores_depend_on_the_distance_alone(x64):
    rng = np.random.default_rng(0)
    q_H, k_H = rng.standard_normal((2, 8))

    def turned(x_H: np.ndarray) -> jax.Array:  # at positions 0 to 9
        return rotate(jnp.tile(x_H, (1, 10, 1, 1)), 100.0)[0, :, 0]

    scores_TS = turned(q_H) @ turned(k_H).T
    for distance in range(-9, 10):
        same = np.diagonal(scores_TS, distance)
        np.testing.assert_allclose(same, same[0], rtol=1e-12)
    assert len(np.unique(np.round(scores_TS[0], 6))) == 10
    np.testing.assert_allclose(scores_TS[0, 0], q_H @ k_H, rtol=1e-12)


def test_angles_are_float32_in_a_bfloat16_model():
    x_BTNH = np.ones((1, 1000, 1, 8), jnp.bfloat16)
    want = jax.jit(plain_rotate, static_argnums=1)(np.ones((1, 1000, 1, 8), "f4"), 1e4)
    got = rotate(x_BTNH, 1e4)
    assert got.dtype == jnp.bfloat16
    # One rounding to bfloat16; positions above 256 are not whole numbers there.
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-8, atol=1e-4)


@pytest.mark.slow  # the plain implementation above sees none
def test_no_position_sees_a_later_token():
    model = filled(lambda: Llama(LlamaConfig(**SMALL), rngs=nnx.Rngs(0)))
    before = jnp.arange(16).reshape(1, 16)
    after = before.at[:, 9].set(30)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    first, second = logits(model, before), logits(model, after)
    np.testing.assert_array_equal(first[:, :9], second[:, :9])
    assert not np.allclose(first[:, 9], second[:, 9])


def test_bf16_logits_and_loss_are_fp32():
    tokens = jnp.arange(16).reshape(2, 8)

    def outputs() -> tuple[jax.Array, Any]:
        model = Llama(LlamaConfig(**SMALL, dtype=jnp.bfloat16), rngs=nnx.Rngs(0))
        return model(tokens), model.loss(tokens, tokens, jnp.ones(tokens.shape))

    logits, mean = jax.eval_shape(outputs)
    assert logits.dtype == mean.total.dtype == jnp.float32


@pytest.mark.slow
def test_a_sharded_run_follows_one_device(x64, monkeypatch):
    # In float32 the softmax's roundings, which differ by layout, would show.
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    config = LlamaConfig(**SMALL, dtype=jnp.float64, param_dtype=jnp.float64)
    rng = np.random.default_rng(0)
    shape = (16, 6)
    batch = {
        "inputs": rng.integers(0, 40, shape),
        "targets": rng.integers(0, 40, shape),
        "weights": (rng.random(shape) < 0.7) * 1.0,
    }

    def run(devices: int, replica: int, policy: jshard.Policy) -> Any:
        mesh = jshard.make_mesh(replica=replica, devices=jax.devices()[:devices])
        fsdp, optimizer = jshard.FSDP(mesh, policy), optax.sgd(1.0)
        state = fsdp.init(lambda rngs: Llama(config, rngs=rngs), optimizer)
        step = fsdp.train_step(loss, optimizer)
        state, _ = step(state, fsdp.shard_batch(batch))
        state, metrics = step(state, fsdp.shard_batch(batch))
        return fsdp.fetch(state.params), metrics

    def loss(model: Llama, batch: dict[str, jax.Array]) -> jshard.Mean | jshard.Loss:
        return model.loss(batch["inputs"], batch["targets"], batch["weights"])

    names = jshard.Names("qkv", "attended", "hidden")
    policy = functools.partial(jshard.Policy, min_shard_elements=0)
    got = run(8, 2, policy(remat=names, accumulate=2))
    want = run(1, 1, policy(remat="none"))
    assert relative(got, want) <= 1e-9


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3}, "width=16 divided by num_heads=3 must be"),
        ({"num_heads": 16}, "width=16 divided by num_heads=16 must be an even"),
        ({"num_kv_heads": 3}, "num_heads=4 is not divisible by num_kv_heads=3"),
    ],
)
def test_sizes_that_do_not_divide_are_a_users_error(sizes, message):
    with pytest.raises(jshard.UserError, match=message):
        LlamaConfig(**SMALL | sizes)


# 2 V D + L (4 D^2 + 3 D F + 2 D) + D; 6 (N - V D - norms + L D T).
@pytest.mark.quick("llama.py:2-7b", "llama.py:3-1b", "llama.py:3-405b")
@pytest.mark.parametrize(
    ("name", "parameters", "flops"),
    [
        ("llama.py:2-7b", 6_738_415_616, 6 * (6_607_077_376 + 32 * 4096 * 4096)),
        ("llama.py:2-13b", 13_015_864_320, 6 * (12_851_609_600 + 40 * 5120 * 4096)),
        ("llama.py:3-1b", 1_235_814_400, 6 * (1_235_746_816 + 16 * 2048 * 8192)),
        ("llama.py:3-8b", 8_030_261_248, 6 * (7_504_658_432 + 32 * 4096 * 8192)),
        ("llama.py:3-70b", 70_553_706_496, 6 * (69_501_714_432 + 80 * 8192 * 8192)),
        (
            "llama.py:3-405b",
            405_853_388_800,
            6 * (403_747_897_344 + 126 * 16384 * 8192),
        ),
    ],
)
def test_a_recipe_has_the_size_of_its_model(name, parameters, flops):
    with open_recipe(find_recipe(name)) as recipe:
        config = recipe.get_config()
        assert recipe.flops_per_token is not None
        assert recipe.flops_per_token(config) == flops
        fsdp = jshard.FSDP(jshard.make_mesh())
        state = fsdp.abstract_state(
            lambda rngs: recipe.make_model(config, rngs), recipe.make_optimizer(config)
        )
    assert sum(x.size for x in jax.tree.leaves(state.params)) == parameters
    chex.assert_type(jax.tree.leaves(state.params), jnp.float32)


def test_the_recipe_has_a_key_for_each_field_of_its_model():
    with open_recipe(find_recipe("llama.py:3-8b")) as recipe:
        keys = {**recipe.get_config().model}
    fields = {x.name: x.default for x in dataclasses.fields(LlamaConfig)}
    others = {"dtype", "param_dtype", "max_segments", "neftune_alpha"}  # finetune.py's
    assert fields.keys() - keys == others
    assert {k: keys[k] for k in llama.FAMILY} == {k: fields[k] for k in llama.FAMILY}


@pytest.mark.parametrize("name", ["llama.py", "llama", "llama.py:", "llama.py:4-8b"])
def test_an_unknown_size_is_one_line_that_lists_the_sizes(name):
    with (
        open_recipe(find_recipe(name)) as recipe,
        pytest.raises(jshard.UserError) as error,
    ):
        recipe.get_config()
    assert "2-7b, 2-13b, 3-1b, 3-8b, 3-70b, 3-405b" in str(error.value)


@pytest.mark.slow
def test_a_llama_3_lists_its_keys_trains_in_small_and_resumes(command, tmp_path):
    def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        words = (f"--config={name}", *words)
        env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        return subprocess.run(timeout=120, **command(tmp_path, *words, env=env))

    listed = run("llama.py:3-8b", "--help")
    assert (listed.returncode, listed.stderr) == (0, "")
    for key in ("model.attention=auto", "data.token_dtype=uint32", "batch_size=512"):
        assert f"--config.{key}\n" in listed.stdout

    small = SMALL | {"vocab_size": 256, "sequence_length": 32}
    words = [
        "--workdir=run",
        "--config.batch_size=4",
        "--config.eval_every=0",
        "--config.mesh.cpu_devices=2",
        *(f"--config.model.{key}={value}" for key, value in small.items()),
    ]
    changed = "resuming run after step 2; config differs from the run's: steps 2 -> 3"
    for steps, said in ((2, "step 2/2"), (3, f"{changed}\n")):
        done = run("llama.py:3-8b", f"--config.steps={steps}", *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert said in done.stdout
        config = json.loads((tmp_path / "run/config.json").read_text())
        assert config["recipe"] == "llama:3-8b"
        assert "<h1>llama:3-8b</h1>" in (tmp_path / "run/report.html").read_text()
        newest = step_folder(tmp_path / "run/checkpoints", steps)
        assert "recipe=llama:3-8b, " in inspect.describe(newest)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [x["loss"] for x in map(json.loads, lines) if "loss" in x]
    assert len(losses) == 3
    np.testing.assert_allclose(losses, np.log(256), rtol=0.05)


def test_attention_by_cudnn_where_it_cannot_be_is_a_users_error():
    config = LlamaConfig(**SMALL, attention="cudnn", dtype=jnp.bfloat16)
    tokens = jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(jshard.UserError, match="attention 'cudnn' needs a head width"):
        jax.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))(tokens))

"""Stage check: whether training on this GPU is right; a part fails where it is not."""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jshard
import parity
from jshard.models.llama import Llama, LlamaConfig
from jshard.storage.checkpoint.checkpointer import Checkpointer
from kit.machine import ask_driver
from kit.results import Recorder
from kit.running import Part

FLOAT64_BOUND = 1e-9  # tests/test_parity.py
BF16_BOUND = 2e-2  # of losses; 8 bits of mantissa, and sums in float32
ATTENTION_BOUND = 2e-2  # of an array's norm
OFFLOAD_BOUND = 1e-6
STEPS = 3
OFFLOADS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "all"},
    "activations": {"remat": jshard.Offload("qkv", "attended", "hidden")},
}
# What activations in host memory are compared with: the same ones kept on the device.
_BESIDE = {"activations": "kept"}
_KEPT = {"remat": jshard.Names("qkv", "attended", "hidden")}


def parts(card: str | None) -> list[Part]:
    """The checks."""
    tiny = card is None
    return [
        Part("machine", partial(machine, tiny=tiny), 60),
        Part("parity", partial(follow_plain_runs, tiny=tiny), 300),
        Part("attention", partial(attention, tiny=tiny), 120),
        Part("offload", partial(offload, tiny=tiny), 240),
        Part("checkpoint", partial(save_and_restore, tiny=tiny), 120),
        Part("quick start", partial(quick_start, tiny=tiny), 180),
    ]


def machine(record: Recorder, *, tiny: bool) -> None:
    """What JAX sees; and the clocks while the GPU works."""
    device = jax.local_devices()[0]
    version = getattr(device.client, "platform_version", "")
    record(
        "jax",
        devices=[d.device_kind for d in jax.devices()],
        platform_version=version,
        memory_limit=(device.memory_stats() or {}).get("bytes_limit"),
        memory_kinds=sorted(m.kind for m in device.addressable_memories()),
    )
    size, count = (64, 2) if tiny else (8192, 3000)  # four seconds of an H100
    product, x = jax.jit(jnp.matmul), jnp.ones((size, size), jnp.bfloat16)
    for _ in range(count):
        y = product(x, x)
    gpus = ask_driver()
    jax.block_until_ready(y)
    record("under load", gpus=gpus)


def follow_plain_runs(record: Recorder, *, tiny: bool) -> None:
    """The parity tests' runs on all GPUs, against plain Flax and optax on one."""
    jax.config.update("jax_enable_x64", True)
    bfloat16_losses(record)
    runs: dict[str, tuple[parity.Variant, str, dict[str, Any]]] = {
        "adamw full": (parity.Variant(), "adamw", {"remat": "full"}),
        "adamw dots tied": (parity.Variant(tied=True), "adamw", {"remat": "dots"}),
        "adamw none padding": (
            parity.Variant(padding=True),
            "adamw",
            {"remat": "none"},
        ),
        "lamb accumulate": (parity.Variant(), "lamb", {"accumulate": 4}),
        "muon dropout": (parity.Variant(dropout=True), "muon", {"prefetch": True}),
        "adafactor frozen": (parity.Variant(frozen=True), "adafactor", {}),
        "sgd offload": (parity.Variant(), "sgd", {"offload": "all"}),
    }
    for name, (variant, optimizer, knobs) in list(runs.items())[: 1 if tiny else None]:
        error = parity_error(variant, optimizer, knobs)
        record(name, error=error, bound=FLOAT64_BOUND)
        assert error <= FLOAT64_BOUND, f"{name}: off by {error}"


def parity_error(
    variant: parity.Variant, optimizer: str, knobs: dict[str, Any]
) -> float:
    """The largest relative error of metrics and parameters after some steps."""
    policy = jshard.Policy(min_shard_elements=0, **knobs)
    tx = parity.optimizer(optimizer, jshard.optim.per_layer)
    got = parity.train(variant, tx, jshard.make_mesh(), policy)
    want = parity.reference(variant, optimizer)
    return max(
        parity.worst(got.metrics, want.metrics), parity.worst(got.params, want.params)
    )


def bfloat16_losses(record: Recorder) -> None:
    """Losses with bfloat16 compute against those of the float64 reference."""
    variant = parity.Variant()
    policy = jshard.Policy(
        min_shard_elements=0, precision=jshard.Precision(compute="bfloat16")
    )
    tx = parity.optimizer("adamw", jshard.optim.per_layer)
    got = parity.train(variant, tx, jshard.make_mesh(), policy).metrics["loss"]
    want = parity.reference(variant, "adamw").metrics["loss"]
    error = float(np.max(np.abs(got - want) / want))
    record("bfloat16 losses", error=error, bound=BF16_BOUND)
    assert error <= BF16_BOUND, f"off by {error}"


def attention(record: Recorder, *, tiny: bool) -> None:
    """Attention as steps have it, and its gradients, against float32 in plain JAX."""
    shapes = (
        [(2, 256, 8, 2, 64)]
        if tiny
        else [(4, 1024, 12, 12, 64), (2, 2048, 8, 4, 256), (2, 4096, 32, 8, 128)]
    )
    cases: list[dict[str, Any]] = [{}, {"window": 20}, {"max_segments": 64}]
    cases += [{"max_segments": 64, "window": 20}, {"soft_cap": 2.0}]
    for shape, options in itertools.product(shapes, cases):
        B, T, N, K, H = shape
        keys = jax.random.split(jax.random.key(0), 5)
        sizes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
        arrays = [
            jax.random.normal(key, size, jnp.bfloat16)
            for key, size in zip(keys[:4], sizes, strict=True)
        ]
        begins = jax.random.bernoulli(keys[4], 16 / T, (B, T))
        ids = jnp.cumsum(begins, axis=1) if "max_segments" in options else None
        run = partial(attend_and_back, ids_BT=ids, options=tuple(options.items()))
        with jax.default_matmul_precision("highest"):
            wide = [x.astype(jnp.float32) for x in arrays]
            wanted = run(*wide, name="blockwise")
        names = ["blockwise"] if "soft_cap" in options else ["blockwise", "xla"]
        if not tiny and "soft_cap" not in options:
            names.append("cudnn")
        for name in names:
            found = run(*arrays, name=name)
            errors = {
                part: float(
                    jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
                )
                for part, a, b in zip(
                    ("y", "dq", "dk", "dv"), found, wanted, strict=True
                )
            }
            key = " ".join([f"{name} B{B} T{T} N{N} K{K} H{H}", *options])
            record(key, **errors, bound=ATTENTION_BOUND)
            worst = max(errors.values())
            assert worst <= ATTENTION_BOUND, f"{key}: off by {worst}"


@partial(jax.jit, static_argnames=("options", "name"))
def attend_and_back(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    g_BTNH: jax.Array,
    *,
    ids_BT: jax.Array | None,
    options: tuple[tuple[str, Any], ...],
    name: str,
) -> tuple[jax.Array, ...]:
    """Attended values, and the gradients of queries, keys and values."""
    y_BTNH, back = jax.vjp(
        lambda *qkv: jshard.nn.dot_product_attention(
            *qkv,
            is_causal=True,
            segment_ids_BT=ids_BT,
            implementation=name,
            **dict(options),
        ),
        q_BTNH,
        k_BTKH,
        v_BTKH,
    )
    return y_BTNH, *back(g_BTNH)


def make_step(
    mesh: Any, tiny: bool, **knobs: Any
) -> tuple[jshard.FSDP, optax.GradientTransformation, Any, Any]:
    """A small Llama in float32: (fsdp, optimizer, make_model, train_step).

    In bfloat16, or by TF32, weights that differ in the last bit may round to
    neighbours, and gradients would be 5e-4 off.
    """
    width, length = (64, 64) if tiny else (1024, 1024)
    config = LlamaConfig(
        vocab_size=1024,
        sequence_length=length,
        num_layers=2 if tiny else 4,
        num_heads=width // 64,
        num_kv_heads=width // 64,
        width=width,
        hidden=4 * width,
    )
    fsdp = jshard.FSDP(mesh, jshard.Policy(**knobs))
    optimizer = jshard.optim.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss_fn(model: Llama, batch: dict[str, jax.Array]) -> jshard.Mean:
        with jax.default_matmul_precision("highest"):
            return model.loss(batch["x"], batch["y"], batch["w"])

    step = fsdp.train_step(loss_fn, optimizer)
    return fsdp, optimizer, lambda rngs: Llama(config, rngs=rngs), step


def make_batch(tiny: bool) -> dict[str, np.ndarray]:
    """Random tokens."""
    length = 64 if tiny else 1024
    tokens = np.random.default_rng(0).integers(0, 1024, (8, length + 1))
    weights = np.ones((8, length), np.float32)
    return {"x": tokens[:, :-1], "y": tokens[:, 1:], "w": weights}


def trained(tiny: bool, **knobs: Any) -> tuple[Any, Any, list[dict[str, float]]]:
    """(fsdp, the state after some steps, their metrics)."""
    fsdp, optimizer, make_model, step = make_step(jshard.make_mesh(), tiny, **knobs)
    state = fsdp.init(make_model, optimizer)
    batch, history = fsdp.shard_batch(make_batch(tiny)), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        history.append({name: float(x) for name, x in metrics.items()})
    return fsdp, state, history


def offload(record: Recorder, *, tiny: bool) -> None:
    """What is in host memory trains as what is not.

    To the last bit, where XLA fuses the same operations; else to a rounding.
    """
    beside = {"none": trained(tiny), "kept": trained(tiny, **_KEPT)}
    for name, knobs in list(OFFLOADS.items())[1 if tiny else 0 :]:
        ours, theirs = trained(tiny, **knobs), beside[_BESIDE.get(name, "none")]
        off = max(
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(numbers(ours), numbers(theirs), strict=True)
        )
        record(name, equal=off == 0.0, difference=off, bound=OFFLOAD_BOUND)
        assert off <= OFFLOAD_BOUND, f"offload of {name}: off by {off}"


def numbers(run: tuple[jshard.FSDP, Any, list[dict[str, float]]]) -> list[np.ndarray]:
    """The metrics of a run, and its parameters."""
    fsdp, state, history = run
    metrics = np.array([list(step.values()) for step in history])
    return [metrics, *map(np.asarray, jax.tree.leaves(fsdp.fetch(state.params)))]


def save_and_restore(record: Recorder, *, tiny: bool) -> None:
    """A state on the GPU, on the disk and back, bit for bit."""
    fsdp, optimizer, make_model, _ = make_step(jshard.make_mesh(), tiny)
    state = fsdp.init(make_model, optimizer)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(state))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        with Checkpointer(Path(folder)) as checkpointer:
            checkpointer.save(state)
            stopped = time.perf_counter() - start
        saved = time.perf_counter() - start
        with Checkpointer(Path(folder)) as checkpointer:
            start = time.perf_counter()
            restored = checkpointer.restore(fsdp.abstract_state(make_model, optimizer))
            jax.block_until_ready(restored)
            took = time.perf_counter() - start
    equal = all(
        a.sharding == b.sharding
        and np.array_equal(jax.device_get(a), jax.device_get(b))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    )
    record(
        "state",
        equal=equal,
        bytes=nbytes,
        training_stops_seconds=stopped,
        save_bytes_per_second=nbytes / saved,
        restore_bytes_per_second=nbytes / took,
    )
    assert equal, "the restored state is another"


def quick_start(record: Recorder, *, tiny: bool) -> None:
    """The README's command."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config=gpt.py", f"--workdir={folder}/run"]
        if tiny:
            words += ["--config.steps=10", "--config.log_every=5"]
            words += ["--config.eval_every=0", "--config.model.num_layers=1"]
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "jshard.train", *words], check=True)
        took = time.perf_counter() - start
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line) for line in lines]
    losses = [line["loss"] for line in last if "loss" in line]
    record("gpt.py", seconds=took, first_loss=losses[0], last_loss=losses[-1])
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"

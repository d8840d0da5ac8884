"""Stage kernels: how fast single operations are, and the planner's constants from it.

A kernel is a jitted function with its FLOPs and bytes. It runs many times without the
host waiting in between, so that the GPU's time is what is measured; long enough each
that the host keeps ahead (but for launches, which are in one program).
"""

import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard
from jshard.system.compat.xla_options import compiler_options
from jshard.system.files.atomic import replace_file
from kit.fitting import fit
from kit.results import Recorder
from kit.running import Part

ROUNDS = 5
MIB = 2**20


@dataclass(frozen=True)
class Kernel:
    """A program of one operation, or a few.

    Attributes:
      name: unique within its part.
      run: a function of arrays.
      shapes: of these, with dtypes.
      flops: as the planner counts them: matrix products and attention.
      bytes: least that it reads and writes.
      repeats: kernels in one run of it.
    """

    name: str
    run: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    flops: float = 0.0
    bytes: int = 0
    repeats: int = 1


def parts(card: str | None) -> list[Part]:
    """Kinds of kernels, and the constants that follow."""
    tiny = card is None
    return [
        *(
            Part(name, functools.partial(measure, kernels=make(tiny)), 180)
            for name, make in KERNELS.items()
        ),
        Part("host", functools.partial(host_links, tiny=tiny), 90),
        Part("collectives", functools.partial(collectives, tiny=tiny), 180),
        # Again with what a later run of the stage adds.
        Part("constants", functools.partial(constants, card=card), 60, repeat=True),
    ]


def _shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def products(tiny: bool) -> list[Kernel]:
    """Matrix products as layers have them: tokens x in -> out, and the gradients'."""
    if tiny:
        sizes = [(64, 64, 128)]
    else:
        sizes = [
            (8192, 8192, 8192),  # the usual yardstick
            (16384, 4096, 4096), (16384, 4096, 11008), (16384, 11008, 4096),  # 7B
            (4096, 16384, 11008),  # its weights' gradients
            (16384, 4096, 14336), (16384, 4096, 128256),  # 8B, its head
            (32768, 2048, 8192), (32768, 8192, 2048),  # 1B
            (65536, 768, 2304), (65536, 768, 3072), (65536, 3072, 768),  # GPT-2
            (768, 65536, 3072), (8192, 768, 50304),
        ]  # fmt: skip
    found = []
    for m, k, n in sizes:
        name, flops = f"{m}x{k}x{n}", 2.0 * m * k * n
        found.append(_product(f"bf16 {name}", _dot, m, k, n, flops))
        if m * n <= 2**30:
            # Planned at half the peak of bf16: TF32.
            found.append(_product(f"f32 {name}", _dot, m, k, n, flops, jnp.float32))
            fp8 = jnp.float8_e4m3fn
            x, y = _shape(m, k, dtype=fp8), _shape(n, k, dtype=fp8)
            nbytes = m * k + k * n + 2 * m * n
            found.append(Kernel(f"fp8 {name}", _fp8_dot, (x, y), flops, nbytes))
    return found


def _product(
    name: str,
    run: Callable[..., Any],
    m: int,
    k: int,
    n: int,
    flops: float,
    dtype: Any = jnp.bfloat16,
) -> Kernel:
    shapes = _shape(m, k, dtype=dtype), _shape(k, n, dtype=dtype)
    nbytes = (m * k + k * n + m * n) * jnp.dtype(dtype).itemsize
    return Kernel(name, run, shapes, flops, nbytes)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=x.dtype)


def _fp8_dot(x_MK: jax.Array, y_NK: jax.Array) -> jax.Array:
    """Both by rows, as the only float8 product of Hopper's wants them."""
    dims = (((1,), (1,)), ((), ()))
    return lax.dot_general(x_MK, y_NK, dims, preferred_element_type=jnp.bfloat16)


def attention(tiny: bool) -> list[Kernel]:
    """Causal attention, forward and with its backward; FLOPs as the planner's."""
    sizes = [(2, 64, 4, 2, 16)]
    if not tiny:
        sizes = [(64, 1024, 12, 12, 64), (4, 4096, 32, 32, 128), (2, 8192, 32, 8, 128)]
    found = []
    for B, T, N, K, H in sizes:
        name = f"B{B} T{T} N{N} K{K} H{H}"
        q, kv = _shape(B, T, N, H), _shape(B, T, K, H)
        product = B * N * T * T * H  # 2 of multiply and add, half of it masked
        found.append(Kernel(f"forward {name}", _attend, (q, kv, kv), 2.0 * product))
        found.append(
            Kernel(f"both {name}", _attend_and_back, (q, kv, kv, q), 7.0 * product)
        )
    return found


def _attend(*qkv: jax.Array) -> jax.Array:
    return jshard.nn.dot_product_attention(*qkv, is_causal=True)


def _attend_and_back(*qkvg: jax.Array) -> Any:
    _, back = jax.vjp(_attend, *qkvg[:3])
    return back(qkvg[3])


def memory(tiny: bool) -> list[Kernel]:
    """Fusions that memory bounds: a norm, an activation, an optimizer's update."""
    rows, width = (64, 64) if tiny else (32768, 4096)
    size = rows * width
    x, f = _shape(rows, width), _shape(rows, width, dtype=jnp.float32)
    return [
        Kernel("copy bf16", lambda x: -x, (x,), bytes=4 * size),
        Kernel("copy f32", lambda x: -x, (f,), bytes=8 * size),
        Kernel("rms norm bf16", _rms_norm, (x,), bytes=4 * size),
        Kernel(
            "silu product bf16", lambda x, y: jax.nn.silu(x) * y, (x, x), bytes=6 * size
        ),
        Kernel("adamw f32", _adamw, (f, f, f, f), bytes=28 * size),
        Kernel("transpose bf16", lambda x: x.T, (x,), bytes=4 * size),
    ]


def _rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def _adamw(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v


def launches(tiny: bool) -> list[Kernel]:
    """Chains of kernels that do next to nothing, in one program."""
    count = 20 if tiny else 300

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(count):
            x = lax.optimization_barrier(x + 1)
        return x

    def loop(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, x: jnp.sin(x), x)

    x = _shape(1024, dtype=jnp.float32)
    return [
        Kernel("in a row", chain, (x,), repeats=count),
        Kernel("in a loop", loop, (x,), repeats=count),
    ]


KERNELS: dict[str, Callable[[bool], list[Kernel]]] = {
    "products": products,
    "attention": attention,
    "memory": memory,
    "launches": launches,
}


def measure(record: Recorder, *, kernels: list[Kernel]) -> None:
    """Times kernels; one that fails is recorded, and the others go on."""
    for kernel in kernels:
        if record.has(kernel.name):
            continue
        inputs = [
            jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
            for key, x in zip(
                jax.random.split(jax.random.key(0), len(kernel.shapes)),
                kernel.shapes,
                strict=True,
            )
        ]
        try:
            compiled = compile_kernel(kernel, inputs, jax.default_backend())
            seconds = time_calls(lambda c=compiled, i=inputs: c(*i))
        except jax.errors.JaxRuntimeError as error:  # out of memory, most likely
            record(kernel.name, failed=str(error).splitlines()[0])
            continue
        each = [x / kernel.repeats for x in seconds]
        middle = statistics.median(each)
        record(
            kernel.name,
            seconds=middle,
            least=min(each),
            most=max(each),
            flops=kernel.flops,
            flops_per_second=kernel.flops / middle,
            bytes=kernel.bytes,
            bytes_per_second=kernel.bytes / middle,
            ran_as=ran_as(compiled.as_text() or ""),
        )


def compile_kernel(kernel: Kernel, inputs: Any, platform: str) -> jax.stages.Compiled:
    """With the options that steps are compiled with."""
    run = jax.jit(kernel.run, compiler_options=compiler_options(platform, 1))
    return run.lower(*inputs).compile()


def time_calls(call: Callable[[], Any], least: float = 0.05) -> list[float]:
    """Seconds of a call in each of some rounds, which take at least so long."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = max(3, round(least / (time.perf_counter() - start)))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            last = call()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - start) / count)
    return found


def ran_as(text: str) -> list[str]:
    """Libraries' kernels that a program calls, as cuBLAS's for float8."""
    marked = (line.split('custom_call_target="')[1:] for line in text.splitlines())
    return sorted({part.split('"')[0] for parts in marked for part in parts})


def host_links(record: Recorder, *, tiny: bool) -> None:
    """Copies between device memory and pinned host memory, each way."""
    device = jax.local_devices()[0]
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    size = MIB if tiny else 1024 * MIB
    x = jax.random.normal(jax.random.key(0), (size // 4,))
    hosted = jax.device_put(x, host)
    for name, value, to in (("to host", x, host), ("from host", hosted, there)):
        seconds = statistics.median(
            time_calls(lambda v=value, to=to: jax.device_put(v, to))
        )
        record(name, seconds=seconds, bytes=size, bytes_per_second=size / seconds)


def collectives(record: Recorder, *, tiny: bool) -> None:
    """Gathers, scatters and sums over all devices, by size."""
    count = len(jax.devices())
    if count == 1:
        record("skipped", why="one device has nobody to talk to")
        return
    mesh = Mesh(jax.devices(), ("x",))
    # XLA:CPU hangs where too many are under way (jshard/sharding/cpu/pacing.py).
    pace = jax.block_until_ready if tiny else lambda x: x
    for kernel in moved(mesh, [2**16] if tiny else [2**i for i in range(16, 31, 2)]):
        if record.has(kernel.name):
            continue
        x = jax.device_put(
            jnp.ones(kernel.shapes[0].shape, kernel.shapes[0].dtype),
            kernel.shapes[0].sharding,
        )
        run = compile_kernel(kernel, [x], jax.default_backend())
        seconds = statistics.median(time_calls(lambda run=run, x=x: pace(run(x))))
        # As NCCL's tests count: bytes that a device receives.
        record(
            kernel.name,
            seconds=seconds,
            bytes=kernel.bytes,
            bytes_per_second=kernel.bytes / seconds,
        )


def moved(mesh: Mesh, sizes: list[int]) -> list[Kernel]:
    """Collectives of so many bytes in all; ``bytes`` are what a device receives."""
    n = mesh.size
    kinds: dict[str, tuple[Any, PartitionSpec, PartitionSpec, int]] = {
        "all-gather": (
            lambda x: lax.all_gather(x, "x", tiled=True),
            PartitionSpec("x"), PartitionSpec(), 1,
        ),
        "reduce-scatter": (
            lambda x: lax.psum_scatter(x, "x", tiled=True),
            PartitionSpec(), PartitionSpec("x"), 1,
        ),
        "all-reduce": (lambda x: lax.psum(x, "x"), PartitionSpec(), PartitionSpec(), 2),
    }  # fmt: skip
    return [
        Kernel(
            f"{name} {size}",
            jax.shard_map(
                run, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
            ),
            (
                jax.ShapeDtypeStruct(
                    (size // 2,), jnp.bfloat16, sharding=NamedSharding(mesh, before)
                ),
            ),
            bytes=turns * size * (n - 1) // n,
        )
        for size in sizes
        for name, (run, before, after, turns) in kinds.items()
    ]


def constants(record: Recorder, *, card: str | None) -> None:
    """Writes what ``python -m jshard.plan --constants=FILE`` reads."""
    found = fit(record.of("kernels"), card)
    path = record.out / "constants.json"
    replace_file(path, as_json(found))
    record(path.name, **found)


def as_json(found: dict[str, Any]) -> str:
    """The file's text."""
    return json.dumps(found, indent=1) + "\n"

"""What offloading costs and saves, read from programs compiled for H100s.

    JAX_PLATFORMS=cpu python benchmarks/offload.py --gpus 8

Needs no GPU, but JAX's CUDA plugin (pip install 'jshard[plan]'). For each choice of
`Policy.offload`, and for an update computed by the host's own cores: memory of a device
and of its host, bytes that cross the bus in a step, and how transfers lie in the
schedule. "both ways" are transfers during which another one goes the other way,
"beside work" those during which something is computed or gathered.
"""

import argparse
import collections
import functools
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental.compute_on import compute_on

sys.path.insert(0, str(Path(__file__).parents[1]))

import jshard
from jshard.models.gpt import GPT, GPTConfig
from jshard.plan import GPUS, compile_for, devices, tracing_for
from jshard.sharding.layout.memory_kinds import typed_as_device
from jshard.sharding.settings.mesh import BATCH
from jshard.sharding.update.end_of_step import update
from jshard.system.errors import UserError

GIB, BUS = 2**30, 55e9  # bytes/s, one way, of 16 lanes of PCIe 5 in practice
ADAMW = optax.adamw(1e-4)
OPTIMIZER = jshard.optim.chain(optax.clip_by_global_norm(1.0), ADAMW)
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_TYPE = re.compile(r"(pred|[a-z]+\d+)\[([\d,]*)\](\{[^}]*\})?")
_WORK = re.compile(
    r"fusion\.?\d* = |custom-call\(|all-gather-start|reduce-scatter-start"
)


def arrays(text: str) -> list[tuple[int, bool]]:
    """Bytes of each array type in ``text``, and whether it is in host memory."""
    found = []
    for dtype, dims, layout in _TYPE.findall(text):
        size = int(re.sub(r"\D", "", dtype) or 8) // 8
        for dim in filter(None, dims.split(",")):
            size *= int(dim)
        found.append((size, "S(5)" in layout))
    return found


def transfer(line: str) -> tuple[str, int] | None:
    """("in" or "out", bytes) of the start of a transfer over the bus."""
    types = arrays(line.split("-start(")[0])
    if re.match(r"\s*(ROOT )?%dynamic-update-slice-start", line):
        return ("out", types[1][0]) if types[0][1] else None
    if re.match(r"\s*(ROOT )?%dynamic-slice-start", line):
        device = [size for size, hosted in types[1:] if not hosted]
        return ("in", max(device)) if types[0][1] else None
    if " copy-start(" in line and types[0][1] != types[1][1]:
        return ("out" if types[0][1] else "in", types[0][0])
    return None


def schedule(text: str) -> collections.Counter:
    """Bytes and transfers of a program by direction, and what they overlap with."""
    parts = re.split(r"\n(?=%|ENTRY )", text)
    bodies = {m[1]: p for p in parts if (m := re.match(r"(?:ENTRY )?%([\w.\-]+)", p))}
    total: collections.Counter = collections.Counter()

    def walk(name: str, times: int) -> None:
        running: dict[str, list] = {}  # name: direction, other way, beside work
        types: dict[str, tuple[int, bool]] = {}
        for line in bodies[name].splitlines():
            if made := re.match(r"\s*%([\w.\-]+) = (\S+) ", line):
                types[made[1]] = next(iter(arrays(made[2])), (0, False))
            if copy := re.match(r"\s*%([\w.\-]+) = .* copy\(%([\w.\-]+)\)", line):
                (size, there), (_, here) = types[copy[1]], types[copy[2]]
                if there != here:  # waited for
                    total[f"bytes {'out' if there else 'in'}"] += times * size
                    total["transfers"] += times
            if started := transfer(line):
                way, size = started
                other = [r for r in running.values() if r[0] != way]
                for record in other:
                    record[1] = True
                key = re.search(r"%([\w.\-]+) =", line)
                assert key
                running[key[1]] = [way, bool(other), False]
                total[f"bytes {way}"] += times * size
            elif "-done(" in line and (ended := re.search(r"-done\(%([\w.\-]+)", line)):
                if record := running.pop(ended[1], None):
                    total["transfers"] += times
                    total["both ways"] += times * record[1]
                    total["beside work"] += times * record[2]
            elif _WORK.search(line):
                for record in running.values():
                    record[2] = True
            if loop := re.search(r" while\(.*body=%([\w.\-]+)", line):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                walk(loop[1], times * int(trips[1] if trips else 1))

    walk(next(m[1] for p in parts if (m := re.match(r"ENTRY %([\w.\-]+)", p))), 1)
    return total


def on_the_host(mesh: Any, policy: jshard.Policy, moving: Any, given: Any) -> Any:
    """The update by the host's cores: gradients go there, parameters come back.

    Clipping is left out: its all-reduces, too, would run there, and cannot.
    """
    move = lambda tree, space: jax.tree.map(lambda x: jax.device_put(x, space), tree)
    plain = functools.partial(update, mesh, policy, ADAMW)
    compute = compute_on("device_host")(jax.jit(plain))
    # Not typed as the host's: optax makes constants, which have a device's type.
    there = jax.tree.map(typed_as_device, move((moving, given), HOST))
    params, *rest = compute(*there)
    return move(params, DEVICE), *move(rest, HOST)


def trace_step(config: GPTConfig, mesh: Any, offload: Any, batch: int) -> Any:
    """A train step; with offload "host" an update alone, computed there."""
    precision = jshard.Precision(compute="bfloat16", reduce="float32")
    of_state = "optimizer" if offload == "host" else offload
    fsdp = jshard.FSDP(mesh, jshard.Policy(precision=precision, offload=of_state))
    optimizer = ADAMW if offload == "host" else OPTIMIZER
    state = fsdp.abstract_state(lambda rngs: GPT(config, rngs=rngs), optimizer)
    if offload == "host":
        policy = jshard.Policy()
        loss = jax.ShapeDtypeStruct((), jnp.float32, sharding=state.step.sharding)
        given = (jax.tree.map(_on_device, state.params), loss, state.step, None)

        @functools.partial(jax.jit, donate_argnums=0)
        def run(moving: Any, given: Any) -> Any:
            return on_the_host(mesh, policy, moving, given)

        return run.trace((state.params, state.opt_state, state.ema), given)

    def loss_fn(model: Any, batch: Any) -> jshard.Mean:
        return model.loss(batch["tokens"], batch["tokens"], batch["weights"])

    place = jax.sharding.NamedSharding(mesh, BATCH)
    shape = (batch, config.sequence_length)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    weights = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
    step = fsdp.train_step(loss_fn, optimizer)
    return step.trace(state, {"tokens": tokens, "weights": weights})


def _on_device(x: Any) -> Any:
    place = x.sharding.with_memory_kind(None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=4, help="on a GPU")
    options = parser.parse_args()
    config = GPTConfig(
        vocab_size=50304, sequence_length=2048, num_layers=options.layers,
        width=options.width, num_heads=options.width // 128, loss_chunk=2048,
        attention="cudnn",
    )  # fmt: skip
    try:
        gpus = devices(f"h100:{options.gpus}")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    mesh = jshard.make_mesh(devices=gpus)
    print(f"jax {jax.__version__}, GPT of {options.layers} x {options.width}", end=", ")
    print(f"{options.gpus} x H100, GiB a GPU", flush=True)
    print(
        "offload    device  host  in  out  s on the bus  transfers  both ways", end=""
    )
    print("  beside work")
    for offload in (None, "optimizer", "all", "host"):
        sequences = options.sequences * options.gpus
        with tracing_for(GPUS["h100"]):
            traced = trace_step(config, mesh.abstract_mesh, offload, sequences)
        try:
            compiled = compile_for(mesh, traced)
        except jax.errors.JaxRuntimeError as error:
            print(f"{offload!s:10} does not compile: {str(error).splitlines()[0]}")
            continue
        memory, seen = compiled.memory_analysis(), schedule(compiled.as_text() or "")
        device = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
        seconds = max(seen["bytes in"], seen["bytes out"]) / BUS
        sizes = (device, host, seen["bytes in"], seen["bytes out"])
        counts = [seen[name] for name in ("transfers", "both ways", "beside work")]
        name = "host (update alone)" if offload == "host" else str(offload)
        print(name.ljust(10), *(f"{x / GIB:.2f}" for x in sizes), end="  ")
        print(f"{seconds:.3f}", *counts, flush=True)


if __name__ == "__main__":
    main()

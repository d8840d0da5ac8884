"""CPU seconds in which a step is traced, lowered and compiled, by several systems.

    python benchmarks/compile_parts.py
    python benchmarks/compile_parts.py --topology=h100:8    # needs the "plan" extra
    python benchmarks/compile_parts.py --python=PATH        # another JAX, or PyTorch

The model is what Flax users write: twelve blocks in an ``nnx.List``, 195 parameters,
AdamW and the norm of the gradients. "plain" is one device, "gspmd" shards the same
arrays by ``jit``, "fsdp2" is PyTorch's ``fully_shard`` of each block compiled by
inductor, one process of a group of one. Each is compiled several times, in turns, each
time in a new process without a cache; the least is printed, as what is above it is the
noise of the machine.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

WIDTH, BLOCKS, HEADS, VOCABULARY, BATCH, LENGTH = 64, 12, 4, 256, 16, 64
PARTS = ("trace", "lower", "compile")


def seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def timed(steps: dict[str, Callable[[Any], Any]]) -> dict[str, float]:
    """The seconds of each step, which takes the result of the one before it."""
    taken, result = {}, None
    for name, step in steps.items():
        start = seconds()
        result = step(result)
        taken[name] = seconds() - start
    return taken


def flax_model() -> tuple[type, Callable[[Any], Any]]:
    """The type of a block, and a function that makes the model."""
    import jax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            square = lambda: nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.query, self.key = square(), square()
            self.value, self.out = square(), square()
            self.after = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            y, shape = self.before(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
            heads = [f(y).reshape(shape) for f in (self.query, self.key, self.value)]
            y = jax.nn.dot_product_attention(*heads, is_causal=True)
            x = x + self.out(y.reshape(x.shape))
            return x + self.down(jax.nn.gelu(self.up(self.after(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(BLOCKS)])
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(self.norm(x))

    return Block, lambda rngs: Model(rngs)


def measure_jshard(topology: str | None) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import optax

    import jshard
    from jshard.plan import devices, tracing_for
    from jshard.plan.topology import parse

    Block, make = flax_model()
    found = devices(topology) if topology else jax.devices()
    policy = jshard.Policy(remat="none")  # as the others
    fsdp = jshard.FSDP(jshard.make_mesh(devices=found), policy, units=(Block,))
    optimizer = optax.adamw(1e-3)
    state = fsdp.abstract_state(make, optimizer)
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}

    def loss_fn(model, batch):
        tokens = batch["tokens"]
        losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens)
        return jshard.Mean(jnp.sum(losses), losses.size)

    step = fsdp.train_step(loss_fn, optimizer)
    with tracing_for(parse(topology)[0]) if topology else nullcontext():
        return timed(
            {
                "trace": lambda _: step.trace(state, batch),
                "lower": lambda traced: traced.lower(),
                "compile": lambda lowered: lowered.compile(),
            }
        )


def measure_jax(topology: str | None, *, shard: bool) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    _, make = flax_model()
    graph, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param)
    optimizer = optax.adamw(1e-3)
    moments = jax.eval_shape(optimizer.init, params)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    found = jax.devices()
    if topology:
        from jshard.plan import devices

        found = devices(topology)
    found = np.array(found if shard else found[:1])
    mesh = Mesh(found, ("data",), axis_types=(AxisType.Auto,))

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        fits = x.ndim and x.shape[0] % len(found) == 0
        spec = PartitionSpec("data" if fits else None) if x.ndim else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def step(params, moments, tokens):
        def loss_fn(params):
            logits = nnx.merge(graph, params)(tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(logits, tokens).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, new = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return params, new, loss, optax.global_norm(grads)

    given = jax.tree.map(placed, (params, moments, tokens))
    return timed(
        {
            "trace": lambda _: jax.jit(step, donate_argnums=(0, 1)).trace(*given),
            "lower": lambda traced: traced.lower(),
            "compile": lambda lowered: lowered.compile(),
        }
    )


def measure_fsdp2() -> dict[str, float]:
    """The first step, of which inductor's compilation is all but milliseconds."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            y, shape = self.before(x), (*x.shape[:2], HEADS, WIDTH // HEADS)
            heads = [f(y).view(shape) for f in (self.query, self.key, self.value)]
            heads = [head.transpose(1, 2) for head in heads]
            y = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return functional.linear(self.norm(x), self.embed.weight)

    torch.set_num_threads(1)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model: Any = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)

    def first(_: Any) -> None:
        logits = model(tokens).flatten(0, 1)
        functional.cross_entropy(logits, tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    taken = timed({"compile": first})
    dist.destroy_process_group()
    return taken


SYSTEMS: dict[str, Callable[[str | None], dict[str, float]]] = {
    "plain": lambda topology: measure_jax(topology, shard=False),
    "gspmd": lambda topology: measure_jax(topology, shard=True),
    "jshard": measure_jshard,
    "fsdp2": lambda _: measure_fsdp2(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--systems", default="plain,gspmd,jshard", help=str([*SYSTEMS]))
    parser.add_argument("--topology", help="compile for absent GPUs, like h100:8")
    parser.add_argument("--python", default=sys.executable, help="which runs them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(SYSTEMS[args.only](args.topology)))
        return
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {
        "PYTHONPATH": str(root),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    words = [
        args.python,
        __file__,
        *([f"--topology={args.topology}"] * bool(args.topology)),
    ]
    best: dict[str, dict[str, float]] = {}
    for _ in range(args.repeats):
        for system in args.systems.split(","):
            run = [*words, f"--only={system}"]
            done = subprocess.run(
                run, env=environment, stdout=subprocess.PIPE, check=True, text=True
            )
            taken = json.loads(done.stdout.splitlines()[-1])
            if sum(taken.values()) < sum(best.get(system, {"": 1e9}).values()):
                best[system] = taken
    print("| CPU seconds | trace | lower | compile | all | by the first |")
    print("|---|---|---|---|---|---|")
    first = sum(next(iter(best.values())).values())
    for system, taken in best.items():
        cells = [f"{taken[part]:.2f}" if part in taken else "" for part in PARTS]
        whole = sum(taken.values())
        print(f"| {system} | {' | '.join(cells)} | {whole:.2f} | {whole / first:.2f} |")


if __name__ == "__main__":
    main()

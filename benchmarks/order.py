"""What one order of collectives costs on CPUs: a step with it and without.

    python benchmarks/order.py

The same programs, compiled once as jshard compiles them and once without ``in_order``,
run in turn; medians. On JAX 0.12 the second kind may hang (docs/log/cpus.md).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest import mock

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_compilation_cache", False)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jshard  # noqa: E402
from jshard.models.gpt import GPT, GPTConfig  # noqa: E402


def make_step(width: int, devices: int, remat: str) -> tuple[Callable, list[float]]:
    """A step on one batch, and the seconds to trace and to compile it."""
    config = GPTConfig(
        vocab_size=259, sequence_length=128, num_layers=6, num_heads=4, width=width,
        tied=False,
    )  # fmt: skip
    mesh = jshard.make_mesh(devices=jax.devices()[:devices])
    fsdp = jshard.FSDP(mesh, jshard.Policy(remat=remat))
    optimizer = jshard.optim.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = fsdp.init(lambda rngs: GPT(config, rngs=rngs), optimizer)
    tokens = np.random.RandomState(0).randint(0, 256, (16, 128))
    batch = fsdp.shard_batch(
        {"tokens": tokens, "weights": np.ones((16, 128), np.float32)}
    )

    def loss_fn(model, batch):
        tokens = batch["tokens"]
        return model.loss(tokens, jnp.roll(tokens, -1, 1), batch["weights"])

    start = time.perf_counter()
    lowered = fsdp.train_step(loss_fn, optimizer).lower(state, batch)
    middle = time.perf_counter()
    compiled = lowered.compile()
    seconds = [middle - start, time.perf_counter() - middle]

    def step():
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))

    step()
    return step, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(f"jax {jax.__version__}")
    print("devices  width  remat  step ms  without  ratio  trace s  without  compile s")
    for devices, width, remat in (
        (2, 64, "full"), (8, 64, "full"), (8, 64, "none"), (2, 256, "full"),
        (8, 256, "full"), (8, 256, "none"), (2, 512, "full"), (8, 512, "dots"),
    ):  # fmt: skip
        ordered, made = make_step(width, devices, remat)
        with mock.patch("jshard.sharding.step.fsdp.in_order", lambda fn: fn):
            free, made_free = make_step(width, devices, remat)
        times: dict[Callable, list[float]] = {ordered: [], free: []}
        for _ in range(options.repeats):
            for step, taken in times.items():
                start = time.perf_counter()
                step()
                taken.append(1e3 * (time.perf_counter() - start))
        ratio = statistics.median(map(lambda a, b: a / b, *times.values()))
        with_, without = map(statistics.median, times.values())
        print(
            f"{devices:7}  {width:5}  {remat:5}  {with_:7.1f}  {without:7.1f}  "
            f"{ratio:5.3f}  {made[0]:7.2f}  {made_free[0]:7.2f}  "
            f"{made[1]:.2f} / {made_free[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Compile time of a train step at 4 and at 48 layers.

    python benchmarks/compile_time.py

A scanned model's program does not grow with depth, and so neither should its compile
time. Each depth is compiled several times, alternating, with no compilation cache; the
minimum is printed, since anything above it is the machine's noise.
"""

import argparse
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_compilation_cache", False)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jshard  # noqa: E402
from jshard.models.gpt import GPT, GPTConfig  # noqa: E402


def measure(num_layers: int, optimizer: optax.GradientTransformation) -> list[float]:
    """Seconds to trace (with lowering) and to compile one step."""
    config = GPTConfig(
        vocab_size=256, sequence_length=128, num_layers=num_layers, width=128,
        num_heads=4, tied=False,
    )  # fmt: skip
    fsdp = jshard.FSDP(jshard.make_mesh())
    state = fsdp.abstract_state(lambda rngs: GPT(config, rngs=rngs), optimizer)
    tokens = jax.ShapeDtypeStruct((32, 128), jnp.int32)
    batch = {"tokens": tokens, "weights": jax.ShapeDtypeStruct((32, 128), jnp.float32)}

    def loss_fn(model, batch):
        return model.loss(batch["tokens"], batch["tokens"], batch["weights"])

    start = time.perf_counter()
    lowered = fsdp.train_step(loss_fn, optimizer).lower(state, batch)
    middle = time.perf_counter()
    lowered.compile()
    return [middle - start, time.perf_counter() - middle]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 48])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    times = {num_layers: [] for num_layers in options.layers}
    for _ in range(options.repeats):
        for num_layers in options.layers:
            times[num_layers].append(measure(num_layers, optax.adamw(1e-3)))
    print(
        f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices"
    )
    print("layers  trace s  compile s  both s  ratio")
    first = None
    for num_layers, rows in times.items():
        trace, compile_ = (min(column) for column in zip(*rows, strict=True))
        both = min(map(sum, rows))
        first = first or both
        print(
            f"{num_layers:6}  {trace:7.2f}  {compile_:9.2f}  {both:6.2f}  "
            f"{both / first:5.3f}"
        )


if __name__ == "__main__":
    main()

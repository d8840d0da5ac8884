"""Losses and traffic of the quick start in several precisions.

    python benchmarks/precision.py [--steps=200] [--only=int8,fp16] [--batch_size=32]

Trains train/gpt.py under each setting, with the same data and initial values, on eight
virtual CPU devices. Every finished setting is kept in a JSON file (--results), so that
an interrupted run goes on; the table and docs/precision.svg show all it holds.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

import jshard  # noqa: E402
from jshard.data.batches import batches, eval_batches  # noqa: E402
from jshard.plan.start_up import traffic  # noqa: E402
from jshard.recipe.config.run_config import complete  # noqa: E402
from jshard.recipe.load import find_recipe, open_recipe  # noqa: E402
from jshard.system.formatting import format_bytes  # noqa: E402
from jshard.system.pages.charts import Axes, element, labels, ticks  # noqa: E402
from kit.pictures import picture  # noqa: E402

BF16 = {"compute": "bfloat16", "reduce": "float32"}
FP16 = {"compute": "float16", "reduce": "float32"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained otherwise than the recipe says."""

    label: str
    precision: dict[str, str]
    overrides: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    loss_scale: bool = False
    moment_dtype: str = "float32"
    replica: int = 1


# The first is what others are compared with.
SETTINGS = {
    "bf16": Setting("bf16 compute and gathers, fp32 reductions", BF16),
    "2x4": Setting("the same on replica 2 x fsdp 4", BF16, replica=2),
    "fp32": Setting("fp32 throughout", {}),
    "int8": Setting("int8 gathers", BF16 | {"gather": "int8"}),
    "fp8": Setting("float8_e4m3fn gathers", BF16 | {"gather": "float8_e4m3fn"}),
    "products": Setting("float8 products and gathers", BF16 | {"products": "float8"}),
    "reduce": Setting("bf16 reductions", BF16 | {"reduce": "bfloat16"}),
    "sum": Setting(
        "bf16 reductions, summed in fp32",
        BF16 | {"reduce": "bfloat16", "sum": "float32"},
    ),
    "moments": Setting(
        "bf16 moments, rounded stochastically", BF16, moment_dtype="bfloat16"
    ),
    # JAX's attention takes no float16 on CPUs, and residuals are as the embedding is.
    "fp16": Setting(
        "fp16 but for attention, loss scaled",
        FP16,
        overrides={
            name: FP16 | {"gather": "float16", "compute": "float32"}
            for name in ("blocks.attention", "embed")
        },
        loss_scale=True,
    ),
}
SMOOTHED = 10  # steps in a moving average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--only", default=",".join(SETTINGS))
    parser.add_argument("--results", type=Path, default=Path("runs/precision.json"))
    parser.add_argument("--chart", type=Path, default=Path("docs/precision.svg"))
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = sorted(set(names) - set(SETTINGS))
    if unknown:
        parser.error(f"--only: unknown {unknown}; possible: {', '.join(SETTINGS)}")

    size = {"steps": options.steps, "batch_size": options.batch_size}
    results = read(options.results, size)
    for name in names:
        if name not in results:
            print(f"{name} ...", flush=True)
            results[name] = train(SETTINGS[name], size)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps({"size": size, "results": results}))
    results = {name: results[name] for name in SETTINGS if name in results}
    print("\n".join(table(results)))
    if "bf16" in results:
        options.chart.write_text(chart(results))
        print(f"chart: {options.chart}")


def read(file: Path, size: dict[str, Any]) -> dict[str, Any]:
    """The settings that ``file`` holds, of runs of this size."""
    if not file.exists():
        return {}
    kept = json.loads(file.read_text())
    if kept["size"] != size:
        raise SystemExit(f"{file} holds runs of {kept['size']}: give another --results")
    return kept["results"]


def train(
    setting: Setting, size: dict[str, Any], seed: int = 0, *, evaluate: bool = True
) -> dict[str, Any]:
    """Losses of every step, the held-out loss, and bytes on the wire."""
    file = find_recipe("gpt.py")
    with open_recipe(file) as recipe:
        config = complete(recipe.get_config(), file)
        config.update({"seed": seed, **size})
        config.optimizer.moment_dtype = setting.moment_dtype
        policy = jshard.Policy(
            precision=jshard.Precision(**setting.precision),
            overrides={
                name: {"precision": jshard.Precision(**dtypes)}
                for name, dtypes in setting.overrides.items()
            },
            loss_scale=setting.loss_scale,
        )
        fsdp = jshard.FSDP(jshard.make_mesh(replica=setting.replica), policy)
        optimizer = recipe.make_optimizer(config)
        make_model = functools.partial(recipe.make_model, config)
        state = fsdp.init(make_model, optimizer, seed=seed)
        step = fsdp.train_step(recipe.loss_fn, optimizer)
        data = batches(
            recipe.make_data(config, "train"),
            batch_size=config.batch_size,
            start_step=0,
            num_steps=config.steps,
        )
        losses, metrics, traced = [], {}, None
        start = time.perf_counter()
        for batch in map(fsdp.shard_batch, data):
            traced = traced or step.trace(state, batch)
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        seconds = time.perf_counter() - start

        step_of = functools.cache(
            lambda examples: fsdp.eval_step(recipe.loss_fn, examples=examples)
        )
        total, held_out = None, recipe.make_data(config, "validation")
        read = eval_batches(
            held_out, batch_size=config.batch_size, devices=fsdp.mesh.size
        )
        for rows, examples in read if evaluate else ():
            means = step_of(examples)(state, fsdp.shard_batch(rows))
            total = means if total is None else total + means
            jax.block_until_ready(total)
    assert traced is not None
    return {
        "losses": losses,
        "eval_loss": None if total is None else float(total.compute()["loss"]),
        "skipped": int(metrics.get("skipped_steps", 0)),
        "wire": wire_bytes(traced.jaxpr.jaxpr, dict(fsdp.mesh.shape)),
        "optimizer_bytes": sum(x.nbytes for x in jax.tree.leaves(state.opt_state)),
        "seconds": seconds,
    }


def wire_bytes(jaxpr: Any, sizes: dict[str, int]) -> dict[str, int]:
    """What a device receives in a step to gather, and what to reduce."""
    kinds = {"gathered": 0, "reduced": 0}
    for (kind, _), found in traffic(jaxpr, sizes).items():
        kinds["gathered" if kind == "all-gather" else "reduced"] += found.wire_bytes
    return kinds


def smooth(losses: list[float]) -> np.ndarray:
    """The mean of every SMOOTHED losses in a row."""
    window = min(SMOOTHED, len(losses))
    return np.convolve(losses, np.full(window, 1 / window), mode="valid")


def table(results: dict[str, Any]) -> list[str]:
    """The results as lines of markdown."""
    lines = [
        "| | held-out loss | largest distance of the smoothed loss | gathered | "
        "reduced | optimizer state |",
        "|---|---|---|---|---|---|",
    ]
    base = results.get("bf16")
    for name, result in results.items():
        distance = "-"
        if base is not None and result is not base:
            apart = smooth(result["losses"]) - smooth(base["losses"])
            distance = f"{np.max(np.abs(apart)):.4f}"
        label = SETTINGS[name].label
        if result["skipped"]:
            label += f" ({result['skipped']} steps skipped)"
        wire = result["wire"]
        cells = [
            label,
            f"{result['eval_loss']:.4f}",
            distance,
            *(format_bytes(wire[kind]) for kind in ("gathered", "reduced")),
            format_bytes(result["optimizer_bytes"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


# Told apart by people who see no red or green, too (Okabe and Ito).
COLORS = ("#000000", "#8a8a8a", "#0072b2", "#d55e00", "#e69f00", "#56b4e9", "#cc79a7")
COLORS += ("#009e73", "#7a5c00", "#b0006d")
WIDTH, LEFT, RIGHT = 900, 60, 620  # px; the names of the lines stand at the right
LABEL_HEIGHT = 17
STYLE = ".line { fill: none; stroke-width: 1.5 } .grid { stroke: #ddd }"


def chart(results: dict[str, Any]) -> str:
    """Two panels of smoothed losses, and of their distance from the first, as SVG."""
    base = smooth(results["bf16"]["losses"])
    losses = {name: smooth(result["losses"]) for name, result in results.items()}
    apart = {name: curve - base for name, curve in losses.items()}
    window = len(results["bf16"]["losses"]) - len(base)
    losses_title = f"training loss, nats a token, mean of {window + 1} steps"
    parts = ['<rect width="100%" height="100%" fill="#fff"/>']
    parts += panel(losses_title, losses, color, 0)
    parts += panel(f"difference from {SETTINGS['bf16'].label}", apart, color, 300)
    for i, name in enumerate(results):
        at = {"x": RIGHT + 16, "y": 48 + LABEL_HEIGHT * i, "fill": color(name)}
        parts.append(element("text", SETTINGS[name].label, **at))
    return picture((WIDTH, 610), "Training loss in several precisions", STYLE, parts)


def color(name: str) -> str:
    return COLORS[list(SETTINGS).index(name)]


def panel(
    title: str, curves: dict[str, np.ndarray], color: Callable[[str], str], top: int
) -> list[str]:
    """A panel whose upper end is at ``top`` px, with a curve in each one's color."""
    first = SMOOTHED  # the step that the first mean ends with
    last = first + len(next(iter(curves.values()))) - 1
    values = np.concatenate(list(curves.values()))
    y_ticks = ticks(float(values.min()), float(values.max()), 5)
    axes = Axes(
        (LEFT, RIGHT, top + 40, top + 270),
        (first, max(last, first + 1)),
        (y_ticks[0], y_ticks[-1]),
    )
    title = element("text", title, x=LEFT, y=top + 24, font_weight="bold")
    lines = [
        axes.line(list(enumerate(curve, first)), class_="line", stroke=color(name))
        for name, curve in curves.items()
    ]
    x_labels = labels(ticks(first, last, 8)) | {last: f"step {last}"}
    return [title, *axes.grid(x_labels, labels(y_ticks)), *lines]


if __name__ == "__main__":
    main()

"""Losses with float8 products beside bf16 ones, over several seeds.

    python benchmarks/float8.py [--seeds=8] [--steps=200] [--batch_size=32]
        [--products=float8,mxfp8,nvfp4] [--model=width=256,num_layers=4] [--rate=1e-3]
        [--compute=float32] [--chart=docs/float8.svg]

Trains train/gpt.py, the quick start, without and with float8 products, from the
same initial values and on the same data, on two virtual CPU devices, which compute the
numbers that GPUs would. Rounding differently early on moves the loss of one run by
more than a hundredth, either way, so seeds are averaged: the table has the mean
difference of the last half of the steps for each seed, and the mean of these with its
standard error. Finished runs are kept in a JSON file (--results).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.system.pages.charts import element
from kit.pictures import picture
from precision import RIGHT, SMOOTHED, STYLE, WIDTH, Setting, panel, read, smooth, train

jax.config.update("jax_num_cpu_devices", 2)

COLORS = {
    "without": "#000000",
    "float8": "#d55e00",
    "mxfp8": "#0072b2",
    "nvfp4": "#009e73",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--products", default="float8,mxfp8,nvfp4", help="NAME,...")
    parser.add_argument("--model", default="", help="KEY=NUMBER,... of config.model")
    parser.add_argument("--rate", type=float, help="peak learning rate")
    parser.add_argument("--compute", default="bfloat16", help="dtype of all else")
    parser.add_argument("--results", type=Path, default=Path("runs/float8.json"))
    parser.add_argument("--chart", type=Path, default=Path("docs/float8.svg"))
    options = parser.parse_args()
    size: dict[str, Any] = {"steps": options.steps, "batch_size": options.batch_size}
    changes = (change.split("=") for change in options.model.split(",") if change)
    size["model"] = {key: int(number) for key, number in changes}
    if options.rate is not None:
        size["optimizer"] = {"learning_rate": options.rate}
    precision = {"compute": options.compute, "reduce": "float32"}
    settings = {"without": Setting("without", precision)}
    for name in options.products.split(","):
        settings[name] = Setting(name, precision | {"products": name})
    results = read(options.results, size)
    for seed in range(options.seeds):
        for name, setting in settings.items():
            if (key := f"{name} {seed}") not in results:
                results[key] = train(setting, size, seed, evaluate=False)
                print(f"{key}: {results[key]['seconds']:.0f} s", flush=True)
                options.results.parent.mkdir(parents=True, exist_ok=True)
                kept = json.dumps({"size": size, "results": results})
                options.results.write_text(kept)
    losses = {
        name: np.array(
            [results[f"{name} {seed}"]["losses"] for seed in range(options.seeds)]
        )
        for name in settings
    }
    print("\n".join(table(losses)))
    options.chart.write_text(chart(losses))
    print(f"chart: {options.chart}")


def table(losses: dict[str, np.ndarray]) -> list[str]:
    """Lines of markdown: the last half of each seed's steps, and the means."""
    half = losses["without"].shape[1] // 2
    means = {name: x[:, half:].mean(axis=1) for name, x in losses.items()}
    names = [name for name in means if name != "without"]
    columns = ["seed", "without", *(x for n in names for x in (n, "difference"))]
    lines = [_row(columns), "|---" * len(columns) + "|"]
    for seed, without in enumerate(means["without"]):
        pairs = ((means[name][seed], means[name][seed] - without) for name in names)
        cells = (x for a, apart in pairs for x in (f"{a:.4f}", f"{apart:+.4f}"))
        lines.append(_row([str(seed), f"{without:.4f}", *cells]))
    row = ["mean", f"{means['without'].mean():.4f}"]
    for name in names:
        apart = means[name] - means["without"]
        error = apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else np.nan
        row += [f"{means[name].mean():.4f}", f"{apart.mean():+.4f} +- {error:.4f}"]
    return [*lines, _row(row)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def chart(losses: dict[str, np.ndarray]) -> str:
    """Two panels of smoothed losses, averaged over seeds, and their differences."""
    curves = {name: smooth(x.mean(axis=0).tolist()) for name, x in losses.items()}
    apart = {n: x - curves["without"] for n, x in curves.items() if n != "without"}
    seeds = len(losses["without"])
    title = f"training loss, nats a token, mean of {SMOOTHED} steps and {seeds} seeds"
    parts = ['<rect width="100%" height="100%" fill="#fff"/>']
    parts += panel(title, curves, COLORS.__getitem__, 0)
    parts += panel("difference from without", apart, COLORS.__getitem__, 300)
    for i, name in enumerate(curves):
        at = {"x": RIGHT + 16, "y": 48 + 17 * i, "fill": COLORS[name]}
        parts.append(element("text", name, **at))
    return picture((WIDTH, 610), "Training loss with float8 products", STYLE, parts)


if __name__ == "__main__":
    main()

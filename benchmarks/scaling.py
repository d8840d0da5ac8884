"""Weak scaling on paper: fully sharded, or within hosts and copied across them.

    JAX_PLATFORMS=cpu python benchmarks/scaling.py

Steps of Llama 3 8B with one sequence a GPU, compiled for 8 to 4096 H100s that are not
there; their schedules replayed with the cost model of docs/plan.md. Prints a markdown
table: milliseconds of a step, those in which nothing hides a collective, GiB of a
device's memory, and GB that come through its network port in a step. Writes a chart of
the steps as SVG.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from compiling import Row, compile_row
from jshard.plan import GPUS
from jshard.plan.fit.hardware import STATED
from jshard.system.pages.charts import Axes, element
from kit.pictures import picture

GIB = 2**30
USABLE = GPUS["h100"].usable
RECIPE, REMAT = "llama:3-8b", "dots"
SIZES = tuple(8 * 2**i for i in range(10))
# strategy: its name, a color that shows on white and on black, and the number of GPUs
# where its line is the upper one, and named
LINES = {
    "zero3": ("sharded over all GPUs", "#d55e00", 2048),
    "hybrid": ("sharded within a host, copied across", "#0090d0", 1024),
}
WIDTH, HEIGHT = 800, 400  # px
LEFT, RIGHT, TOP, BOTTOM = 70, 770, 70, 350
TICKS = [*range(100, 1000, 100), *range(1000, 5000, 250)]  # ms
STYLE = """
.line { fill: none; stroke-width: 2 }
text { fill: #808080 } .grid { stroke: #808080; stroke-opacity: 0.35 }
"""  # gray shows on white and on black, too

Found = dict[str, dict[int, dict[str, Any]]]


def cells(found: dict[str, Any]) -> list[str]:
    """The columns of one strategy."""
    fits = "" if found["total"] <= USABLE else " (does not fit)"
    return [
        f"{found['step'] * 1e3:.1f}",
        f"{found['exposed'] * 1e3:.1f}",
        f"{found['total'] / GIB:.1f}{fits}",
        f"{found['network'] / 1e9:.2f}",
    ]


def network() -> str:
    """What the model takes the links to be."""
    return (
        f"H100s, eight a host; network {STATED.network_port / 1e9:.2f} GB/s a "
        "GPU; collectives by the fastest of NCCL's protocols, by its own model"
    )


def chart(found: Found) -> str:
    """Steps over GPUs, as SVG on no background."""
    steps = {
        strategy: {gpus: 1e3 * row["step"] for gpus, row in rows.items()}
        for strategy, rows in found.items()
    }
    highest = max(max(line.values()) for line in steps.values())
    lowest = min(min(line.values()) for line in steps.values())
    y_ticks = [ms for ms in TICKS if 0.9 * lowest < ms < 1.1 * highest]
    axes = Axes(
        (LEFT, RIGHT, TOP, BOTTOM),
        (min(SIZES), max(SIZES)),
        (y_ticks[0], max(highest, y_ticks[-1])),
        log=True,
    )
    middle, up = {"text_anchor": "middle"}, (TOP + BOTTOM) / 2
    title = f"{RECIPE}, one sequence of 8192 tokens a GPU, remat {REMAT}"
    parts = [
        element("text", title, x=LEFT, y=22),
        element("text", network(), x=LEFT, y=42),
        *axes.grid({size: str(size) for size in SIZES}, {y: f"{y:g}" for y in y_ticks}),
        element("text", "GPUs", x=(LEFT + RIGHT) / 2, y=BOTTOM + 42, **middle),
        element(
            "text",
            "ms a step, predicted (log)",
            x=18,
            y=up,
            transform=f"rotate(-90 18 {up})",
            **middle,
        ),
    ]
    for strategy, (name, color, named) in LINES.items():
        line = steps[strategy]
        parts.append(axes.line(list(line.items()), class_="line", stroke=color))
        parts += [axes.dot(*point, fill=color) for point in line.items()]
        at = {"x": axes.across(named) - 10, "y": axes.up(line[named]) - 10}
        style = {"style": f"fill: {color}", "text_anchor": "end"}
        parts.append(element("text", name, **at, **style))
    label = "Predicted time of a step over the number of GPUs"
    return picture((WIDTH, HEIGHT), label, STYLE, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chart", type=Path, default=Path("docs/scaling.svg"))
    parser.add_argument("--cache", type=Path, help="folder of results to reuse")
    options = parser.parse_args()

    print(f"JAX {jax.__version__}; {RECIPE}, remat {REMAT}\n")
    heads = ["ms", "exposed ms", "GiB", "network GB"]
    heads = [f"{which} {head}" for which in ("all", "hosts") for head in heads]
    print("| GPUs | " + " | ".join(heads) + " |")
    print("|---" * (1 + len(heads)) + "|")
    found: Found = {strategy: {} for strategy in LINES}
    for size in SIZES:
        for strategy, rows in found.items():
            row = Row(
                topology=f"h100:{size}",
                strategy=strategy,
                recipe=RECIPE,
                remat=REMAT,
            )
            rows[size] = compile_row(row, options.cache)
        line = [cell for rows in found.values() for cell in cells(rows[size])]
        print(f"| {size} | " + " | ".join(line) + " |", flush=True)
    options.chart.write_text(chart(found), encoding="utf-8")


if __name__ == "__main__":
    main()

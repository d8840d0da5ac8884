"""How the report and the plan's page lie on a phone and on a desktop, by Chromium.

It says facts of the layout; pixels differ with every version of a font.
"""

import html
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import environment
from jshard.training.report.run_report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
WIDTHS = {"phone": 390, "desktop": 1280}
DARK = {"light": 1, "dark": 0}  # Chromium's preferredColorScheme

# What a page says of itself, in the title of the page around it.
FACTS = """
const box = e => e.getBoundingClientRect();
const shown = e => box(e).width > 0 && box(e).height > 0;
const all = (s, e = document) => [...e.querySelectorAll(s)].filter(shown);
const luminance = c => {
  const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(x => (x / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const style = e => getComputedStyle(e);
const contrast = (e, color) => {
  const a = luminance(style(e)[color]);
  const b = luminance(style(document.querySelector(".tile")).backgroundColor);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
const svgs = all("svg").map(svg => {
  const scale = box(svg).width / svg.viewBox.baseVal.width;
  const ticks = all(".tick", svg);
  // Boxes are lines of text, a little higher than their letters.
  const collide = (a, b) => a.left < b.right && b.left < a.right
    && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  const colliding = (a, i) => ticks.slice(i + 1).filter(b => collide(box(a), box(b)))
    .map(b => `${a.textContent} and ${b.textContent}`);
  return {
    label: svg.getAttribute("aria-label"), width: box(svg).width, top: box(svg).top,
    area: box(svg).width * box(svg).height,
    tick: Math.min(...ticks.map(t => parseFloat(style(t).fontSize) * scale)),
    collisions: ticks.flatMap(colliding),
    contrast: Math.min(...ticks.map(t => contrast(t, "fill"))),
  };
});
const rows = all(".cards").map(cards => {
  const tops = [...cards.children].filter(shown).map(c => Math.round(box(c).top));
  return Object.values(Object.groupBy(tops, top => top)).map(row => row.length);
});
parent.document.title = JSON.stringify({
  width: innerWidth, needed: document.documentElement.scrollWidth, svgs, rows,
  text: contrast(document.body, "color"),
  page: luminance(style(document.body).backgroundColor),
  open: all("details[open]").length,
  first: box(all("figure, .tile")[0]).top,
});
"""


def chromium(page: str, width: int, scheme: str, folder: Path) -> str:
    """The DOM around a frame of that width: windows are 500 pixels wide at least."""
    frame = html.escape(page, quote=True)
    around = folder / "around.html"
    around.write_text(
        "<!doctype html><meta charset=utf-8><title></title><body style='margin: 0'>"
        f'<iframe style="border: 0; width: {width}px; height: 4000px" '
        f'srcdoc="{frame}"></iframe>'
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--window-size=1400,4000", "--virtual-time-budget=5000"]
    command += [f"--blink-settings=preferredColorScheme={DARK[scheme]}"]
    command += [f"--user-data-dir={folder / 'profile'}", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def facts(page: str, width: int, scheme: str, folder: Path) -> dict[str, Any]:
    script = f"<script>addEventListener('load', () => {{{FACTS}}})</script>"
    page = page.replace("</body>", f"{script}</body>")
    found = chromium(page, width, scheme, folder)
    title = found.partition("<title>")[2].partition("</title>")[0]
    assert title, found[-500:]
    return json.loads(html.unescape(title))


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return (folder / "report.html").read_text().replace(str(folder), "runs/gpt")


def write_run(folder: Path) -> None:
    """A run's files, with every chart that a report may have."""
    config = {"model": {"width": 128, "num_layers": 2}, "steps": 40_000}
    (folder / "config.json").write_text(json.dumps({"recipe": "gpt.py", **config}))
    lines = [
        {
            "step": step,
            "time": step / 10,
            "loss": 3 + 400 / step,
            "grad_norm": 1 / step,
            "learning_rate": 1e-3 / step,
            "step_time": 0.1,
            "tokens_per_second": 12_345.0,
            "mfu": 0.4,
        }
        for step in range(1000, 40_001, 1000)
    ]
    lines += [{"step": n, "eval_loss": 3 + 500 / n} for n in range(5000, 40_001, 5000)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    write_report(folder)


@pytest.mark.parametrize("scheme", DARK)
@pytest.mark.parametrize("device", WIDTHS)
def test_the_report_is_readable(report, device, scheme, tmp_path):
    found = facts(report, WIDTHS[device], scheme, tmp_path)
    assert found["width"] == WIDTHS[device]
    assert found["needed"] <= found["width"]  # nothing scrolls sideways
    loss, *others = found["svgs"]
    assert loss["label"].startswith("Loss")
    assert loss["top"] - found["first"] < 100  # in the first card
    assert others
    assert all(loss["area"] >= other["area"] for other in others)
    assert all(loss["tick"] + 0.1 >= other["tick"] for other in others)
    for chart in found["svgs"]:
        assert chart["tick"] >= 9, chart  # px
        assert not chart["collisions"], chart
        assert chart["contrast"] >= 4.5, chart  # WCAG's AA
    check_words(found, scheme)
    if device == "desktop":
        assert min(n for cards in found["rows"] for n in cards) >= 2  # none is alone


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("plan")
    words = ["--config=gpt.py", "--topology=attached", "--config.model.width=64"]
    command = [sys.executable, "-m", "jshard.plan", *words, "--html=plan.html"]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=300)
    return (folder / "plan.html").read_text()


@pytest.mark.parametrize("scheme", DARK)
@pytest.mark.parametrize("device", WIDTHS)
def test_the_plan_is_readable(plan, device, scheme, tmp_path):
    found = facts(plan, WIDTHS[device], scheme, tmp_path)
    assert found["width"] == WIDTHS[device]
    assert found["needed"] <= found["width"]  # tables scroll in themselves
    assert found["open"] == 0
    check_words(found, scheme)


def check_words(found: dict[str, Any], scheme: str) -> None:
    assert found["text"] >= 7
    assert (found["page"] < 0.1) == (scheme == "dark")

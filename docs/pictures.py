"""Makes docs/pictures.png: a run in the terminal, its report, and a plan.

    python -m jshard.train --config=gpt.py --workdir=RUN | tee LOG
    python -m jshard.plan --config=llama.py:3-8b --topology=h100:64 --html=PLAN
    python docs/pictures.py LOG RUN/report.html PLAN

A page shows the three side by side, and Chromium makes a picture of it.
"""

import argparse
import html
import subprocess
import tempfile
from pathlib import Path

FILE = Path(__file__).parent / "pictures.png"
WIDTH, HEIGHT = 1500, 700  # px
_HEAD, _TAIL = 9, 34  # lines of the log that are shown
_COLUMNS = 92  # of the terminal
_SCALE = 0.68  # of the report and the plan

PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #e9e9e6; display: flex; gap: 14px; padding: 14px;
  box-sizing: border-box; height: {height}px; overflow: hidden; }}
pre, div {{ border-radius: 8px; overflow: hidden; margin: 0; }}
pre {{ flex: 0 0 560px; background: #1b1c1e; color: #e6e6e3; padding: 14px 16px;
  box-sizing: border-box; font: 10.5px/1.42 "DejaVu Sans Mono", monospace; }}
div {{ flex: 1; background: white; }}
iframe {{ border: 0; transform: scale({scale}); transform-origin: 0 0;
  width: {inner}%; height: {inner}%; }}
</style><pre>{log}</pre>{frames}"""


def picture(log: Path, pages: list[Path]) -> None:
    """Writes the picture."""
    lines = [line[:_COLUMNS] for line in log.read_text().splitlines()]
    if len(lines) > _HEAD + _TAIL:
        lines = [*lines[:_HEAD], "...", *lines[-_TAIL:]]
    text = html.escape("\n".join(lines))
    frames = "".join(
        f'<div><iframe src="{page.absolute().as_uri()}"></iframe></div>'
        for page in pages
    )
    page = PAGE.format(
        height=HEIGHT, scale=_SCALE, inner=100 / _SCALE, log=text, frames=frames
    )
    with tempfile.NamedTemporaryFile("w", suffix=".html") as file:
        file.write(page)
        file.flush()
        chromium = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        size = [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={FILE}"]
        time = "--virtual-time-budget=5000"  # ms; the plan draws its timeline
        address = Path(file.name).as_uri()
        subprocess.run([*chromium, *size, time, address], check=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("pages", type=Path, nargs="+")
    arguments = parser.parse_args()
    picture(arguments.log, arguments.pages)
    print(f"{FILE}: {FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

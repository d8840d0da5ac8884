r"""Makes the pictures of README.md and of the site's first page.

    python -m jshard.train --config=gpt.py --workdir=RUN | tee LOG
    python -m jshard.plan --config=llama.py:3-8b --topology=h100:64 \
        --config.batch_size=64 --html=PLAN
    python docs/pictures.py LOG RUN/report.html PLAN

A page shows the three side by side, another stacks them for phones, and Chromium makes
a picture of each; the plan has two of its own. Each picture keeps the plan's
figures as text, which tests/docs/test_pictures.py compares with README.md.
"""

import argparse
import html
import re
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

DOCS = Path(__file__).parent
KEYWORD = b"figures\0"  # of the text in a picture
_COLUMNS = {False: 92, True: 58}  # of the terminal; on a phone
_HEAD, _TAIL = 9, 34  # lines of the log that are shown
_PHONE_HEAD, _PHONE_TAIL = 5, 8

STYLE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; background: #e9e9e6; display: flex; gap: 14px; padding: 14px;
  box-sizing: border-box; height: {height}px; overflow: hidden; }}
pre, div {{ border-radius: 8px; overflow: hidden; margin: 0; }}
pre {{ background: #1b1c1e; color: #e6e6e3; padding: 14px 16px;
  box-sizing: border-box; font: 10.5px/1.42 "DejaVu Sans Mono", monospace; }}
div {{ background: white; }}
iframe {{ border: 0; transform: scale({scale}); transform-origin: 0 0;
  width: {inner}%; height: {inner}%; }}
{more}</style><pre>{log}</pre>{frames}"""
WIDE = "pre { flex: 0 0 560px; } div { flex: 1; }"
NARROW = "body { flex-direction: column; } pre { flex: none; } div { flex: 1; }"


def log_part(log: Path, phone: bool) -> str:
    """The beginning and the end of what a run printed."""
    lines = [line[: _COLUMNS[phone]] for line in log.read_text().splitlines()]
    head, tail = (_PHONE_HEAD, _PHONE_TAIL) if phone else (_HEAD, _TAIL)
    if len(lines) > head + tail:
        lines = [*lines[:head], "...", *lines[-tail:]]
    return "\n".join(lines)


def beside(log: Path, pages: list[Path], size: tuple[int, int], phone: bool) -> str:
    """A page of the log and the pages."""
    frames = "".join(
        f'<div><iframe scrolling="no" src="{page.absolute().as_uri()}"></iframe></div>'
        for page in pages
    )
    scale = 0.9 if phone else 0.68
    more, text = NARROW if phone else WIDE, html.escape(log_part(log, phone))
    known = {"height": size[1], "scale": scale, "inner": 100 / scale}
    return STYLE.format(**known, more=more, log=text, frames=frames)


def picture(file: Path, page: str, size: tuple[int, int], factor: int = 1) -> None:
    """Writes a picture of a page."""
    with tempfile.NamedTemporaryFile("w", suffix=".html") as source:
        source.write(page)
        source.flush()
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars"]
        command += [f"--window-size={size[0]},{size[1]}", f"--screenshot={file}"]
        command += [f"--force-device-scale-factor={factor}"]
        command += ["--virtual-time-budget=5000"]  # ms; the plan draws its timeline
        subprocess.run([*command, Path(source.name).as_uri()], check=True)


def figures(plan: str) -> list[str]:
    """The large figures at the top of a plan's page, like "879.0 ms"."""
    return re.findall(r'<div class="tile"><b>([^<]+)</b>', plan)


def keep_text(file: Path, text: str) -> None:
    """Puts a text into a picture, before its end."""
    data = b"tEXt" + KEYWORD + text.encode("latin-1")
    chunk = (
        struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    )
    png = file.read_bytes()
    file.write_bytes(png[:-12] + chunk + png[-12:])


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("log", "report", "plan"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    plan = given.plan.read_text()
    pages, wide, narrow = [given.report, given.plan], (1500, 700), (430, 1210)
    made = {
        "pictures.png": (beside(given.log, pages, wide, False), wide, 1),
        "pictures_phone.png": (beside(given.log, pages, narrow, True), narrow, 2),
        "_static/plan.png": (plan, (1280, 1012), 1),
        "_static/plan_phone.png": (plan, (430, 1005), 2),
    }
    for name, (page, size, factor) in made.items():
        picture(DOCS / name, page, size, factor)
        keep_text(DOCS / name, ", ".join(figures(plan)))
        print(f"{name}: {(DOCS / name).stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

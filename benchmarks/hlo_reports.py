"""Plans programs that others published with their times, from their text alone.

    git clone https://github.com/ASKabalan/jaxdecomp-benchmarks
    python benchmarks/hlo_reports.py jaxdecomp-benchmarks [constants.json]

Each report there has a Fourier transform's optimized program on 8 or 16 A100s, XLA's
account of its memory, and ten measured calls. The last is compared with the plan's
step, XLA's temporary memory with the values that are alive at the same time. Constants
are those of ``jshard.plan --constants``.
"""

import collections
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jshard.plan import plan_file
from jshard.plan.fit.hardware import find_constants
from jshard.plan.hlo import parse
from jshard.plan.memory.live_values import temporary

UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class Report(NamedTuple):
    """A published program."""

    devices: int
    kind: str  # "jaxfft FFT, from 1024": who transforms, which way, and its edge
    text: str
    seconds: float
    temporary: float  # bytes


def reports(folder: Path) -> Iterator[Report]:
    """Yields the reports of A100s in a clone."""
    for path in sorted(folder.glob("out_prof/a100/*/*/*.md")):
        page = path.read_text()
        text = re.search(r"## Compiled Code\n```hlo\n(.*?)\n```", page, re.S)
        rows = dict(re.findall(r"\| ([\w ]+?) +\| (\S[^|]*?) +\|", page))
        size, unit = rows["Temporary Size"].split()
        assert text is not None
        edge = "to 512" if int(rows["X"]) <= 512 else "from 1024"
        yield Report(
            int(path.parts[-3]),
            f"{path.parts[-2]} {rows['Function']}, {edge}",
            text[1],
            float(rows["Last Time"]) / 1e3,
            float(size) * UNITS[unit],
        )


def main() -> None:
    """Prints a row for each kind of program."""
    constants = find_constants(sys.argv[2] if len(sys.argv) > 2 else "fitted")
    memory: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
    times: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for report in reports(Path(sys.argv[1])):
            key, file = (report.devices, report.kind), Path(folder) / "step.hlo"
            file.write_text(report.text)
            timeline = plan_file(file, f"a100:{report.devices}", constants).timeline
            assert timeline is not None
            if not timeline.unknown:  # or the time is that of a library's own kernel
                times[key].append(report.seconds / timeline.seconds)
            followed = temporary(parse(report.text), ()).bytes
            memory[key].append(followed / report.temporary)
    print("| GPUs | program | number | measured / planned step | followed / XLA's |")
    print("|---|---|---|---|---|")
    for key, ratios in sorted(memory.items()):
        found = times[key]
        speed = f"{min(found):.2f} to {max(found):.2f}" if found else "not planned"
        counts = collections.Counter(round(ratio, 2) for ratio in ratios)
        sizes = ", ".join(f"{ratio} ({n})" for ratio, n in sorted(counts.items()))
        print(f"| {key[0]} | {key[1]} | {len(ratios)} | {speed} | {sizes} |")


if __name__ == "__main__":
    main()

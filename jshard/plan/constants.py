"""The speed that a GPU, its memory and its links reach, relative to their data sheets.

``FITTED`` is the default: what ``benchmarks/published.py`` fits to published steps.
``STATED`` are the constants before any fit. ``python -m jshard.plan --constants=NAME``
takes either name, or a file: for example the one that ``benchmarks/gpu.py`` writes
after measuring a GPU.
"""

import dataclasses
import json
import math
from pathlib import Path

from jshard.errors import UserError


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      matmul: share of the dense peak that matrix products reach.
      attention: the same for flash attention's products, forward and backward.
      memory: share of the device memory's bandwidth.
      launch: seconds added to each kernel.
      link: share of NVLink's bandwidth (NCCL's bus bandwidth on 8 x H100).
      network_port: bytes/s of a GPU's own port (370 of 400 Gb/s).
      host_bus: bytes/s to or from the host (PCIe 5.0 x16, each direction).
      low: the least measured step over its prediction, of the steps that confirm the
        constants; 1 if none do.
      high: likewise the largest.
      source: where they come from, in a few words.
    """

    matmul: float = 0.72
    attention: float = 0.72
    memory: float = 0.85
    launch: float = 3e-6
    link: float = 370 / 450
    network_port: float = 370e9 / 8
    host_bus: float = 55e9
    low: float = 1.0
    high: float = 1.0
    source: str = "stated"

    def range_of(self, seconds: float) -> tuple[float, float] | None:
        """Between what a step of ``seconds`` may take; None if nothing confirms it."""
        if self.low == self.high:
            return None
        return self.low * seconds, self.high * seconds


STATED = Constants()
FITTED = dataclasses.replace(
    STATED,
    matmul=0.626,
    attention=0.397,
    memory=0.833,
    low=0.91,
    high=1.10,
    source="fitted to 15 published runs of MaxText, each within 10 % if left out",
)
_NAMED = {"stated": STATED, "fitted": FITTED}


def find_constants(name: str) -> Constants:
    """Returns the constants of a name, "stated" or "fitted", or of a file.

    Raises:
      UserError: it is neither, or the file is invalid.
    """
    return _NAMED.get(name) or read_constants(Path(name))


def read_constants(path: Path) -> Constants:
    """Reads constants from a JSON object; those that it omits stay as stated.

    Raises:
      UserError: the file cannot be read, or a name or value is invalid.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--constants={path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--constants={path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"--constants={path}: must be an object of names and numbers")
    names = [field.name for field in dataclasses.fields(Constants)]
    for name, value in found.items():
        if name not in names:
            raise UserError(
                f"--constants={path}: unknown constant {name!r}; possible: "
                f"{', '.join(names)}"
            )
        if name == "source":
            valid, expected = isinstance(value, str), "text"
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            valid = number and math.isfinite(value) and value > 0
            expected = "a number above 0"
        if not valid:
            raise UserError(f"--constants={path}: {name}={value!r} must be {expected}")
    return Constants(**{"source": str(path), **found})

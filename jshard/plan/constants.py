"""How fast a GPU, its memory and its links are, of what their data sheets say.

Stated, not fitted; or fitted to measurements on a GPU at hand, from a file that
``benchmarks/gpu.py`` writes: ``python -m jshard.plan --constants=FILE``.
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
      attention: the same of flash attention's products, forward and backward.
      memory: share of the device memory's bandwidth.
      launch: seconds a kernel, besides.
      link: share of NVLink's bandwidth (NCCL's bus bandwidth on 8 x H100).
      network_port: bytes/s a GPU through its own port (370 of 400 Gb/s).
      host_bus: bytes/s to or from the host (PCIe 5.0 x16, each way).
      source: where they come from, in a few words.
    """

    matmul: float = 0.72
    attention: float = 0.72
    memory: float = 0.85
    launch: float = 3e-6
    link: float = 370 / 450
    network_port: float = 370e9 / 8
    host_bus: float = 55e9
    source: str = "stated"


STATED = Constants()


def read_constants(path: Path) -> Constants:
    """Constants from a JSON file: an object of any of them; the others stay as stated.

    Raises:
      UserError: the file cannot be read, or says what is no constant.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--constants={path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--constants={path}: is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"--constants={path}: must be an object of names and numbers")
    names = [field.name for field in dataclasses.fields(Constants)]
    for name, value in found.items():
        if name not in names:
            raise UserError(
                f"--constants={path}: {name!r} is no constant; possible: "
                f"{', '.join(names)}"
            )
        if name == "source":
            good = isinstance(value, str)
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            good = number and math.isfinite(value) and value > 0
        if not good:
            raise UserError(
                f"--constants={path}: {name}={value!r} must be "
                f"{'text' if name == 'source' else 'a number above 0'}"
            )
    return Constants(**{"source": str(path), **found})

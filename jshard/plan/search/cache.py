"""Results of compiled programs on the disk, each under a key of all that made it."""

import dataclasses
import functools
import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

from jshard.checkpoint.atomic import replace_file
from jshard.compat import absent_gpus
from jshard.plan import ahead_of_time, constants, topology
from jshard.plan.cost import cost, nccl, timeline
from jshard.plan.hlo import hlo
from jshard.plan.memory import memory
from jshard.plan.program import Program
from jshard.plan.search import evaluation
from jshard.version import versions

# Packages whose version decides what a program compiles to.
_COMPILERS = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc-cu13",
)  # fmt: skip
# Modules whose code, constants included, makes a result of a program.
_MODEL = (
    absent_gpus, ahead_of_time, constants, cost, hlo, evaluation, memory, nccl,
    timeline, topology,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder of small JSON files.

    Attributes:
      folder: which need not exist.
    """

    folder: Path

    def read(self, key: str) -> dict[str, Any] | None:
        """What was written under a key, or None; a damaged entry warns."""
        path = self._path(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if entry["key"] != key:
                raise ValueError(f"has the key {entry['key']!r}")
            return dict(entry["result"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(f"ignored, and made anew: {path} ({error!r})", stacklevel=2)
            return None

    def write(self, key: str, result: dict[str, Any]) -> None:
        """Keeps a result; warns where it cannot be written."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"key": key, "result": result}))
        except OSError as error:
            warnings.warn(f"not kept: cannot write {path} ({error})", stacklevel=2)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def default_folder() -> Path:
    """``$JSHARD_CACHE/plan``, by default ``~/.cache/jshard/plan``."""
    given = os.environ.get("JSHARD_CACHE", "")
    return Path(given or "~/.cache/jshard").expanduser() / "plan"


def program_key(program: Program, lowered: str) -> str:
    """A hash of all that a program's result follows from.

    It is the program's text as XLA gets it, so that whatever changes the step (the
    recipe, what it imports, its data's shapes, jshard itself) changes the key, and
    what does not (a comment, the seed's name) leaves it.

    Args:
      program: traced.
      lowered: its StableHLO.
    """
    parts = {
        "program": lowered,
        "topology": program.topology,
        "mesh": dict(program.mesh.shape),
        "gpu": repr(program.gpu),
        "options": {k: repr(v) for k, v in program.job.fsdp.compiler_options.items()},
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": versions(_COMPILERS),
        "model": _model(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _model() -> str:
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in _MODEL)
    return hashlib.sha256(code).hexdigest()

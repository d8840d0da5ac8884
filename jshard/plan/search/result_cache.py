"""Results of compiled programs on disk, each under a hash of what determines it."""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jshard.plan.program import Program
from jshard.system.compat import absent_gpus
from jshard.system.compat.versions import versions
from jshard.system.errors import warn
from jshard.system.files.atomic import replace_file
from jshard.system.files.untrusted import read_json

# Packages whose versions determine what a program compiles to.
_COMPILERS = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc-cu13",
)  # fmt: skip
_PLANNER = Path(__file__).parents[1]


def read_result(folder: Path, key: str) -> dict[str, Any] | None:
    """Returns the cached result of a key, or None; warns of a damaged file."""
    path = folder / f"{key}.json"
    try:
        entry = read_json(path)
        if entry["key"] != key:
            raise ValueError(f"has the key {entry['key']!r}")
        return dict(entry["result"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"ignored a damaged cache file, and compiled again: {path}"
        warn(f"{message} ({error!r})")
        return None


def write_result(folder: Path, key: str, result: dict[str, Any]) -> None:
    """Caches a result; warns if it cannot be written."""
    path = folder / f"{key}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({"key": key, "result": result}))
    except OSError as error:
        warn(f"result not cached: cannot write {path} ({error})")


def program_key(program: Program, lowered: str) -> str:
    """Returns a hash of everything that determines a program's result.

    Its StableHLO, ``lowered``, is part of it, so the key changes with everything that
    changes the step: the recipe, its imports, the shapes of its data, jshard itself.
    """
    parts = {
        "program": lowered,
        "topology": program.topology,
        "mesh": dict(program.mesh.shape),
        "gpu": repr(program.gpu),
        "options": {k: repr(v) for k, v in program.options.items()},
        "flags": os.environ.get("XLA_FLAGS", ""),
        "versions": versions(_COMPILERS),
        "planner": _planner_hash(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _planner_hash() -> str:
    files = [*sorted(_PLANNER.rglob("*.py")), Path(str(absent_gpus.__file__))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

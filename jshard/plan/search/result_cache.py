"""Plans and estimates on disk, each under a hash of what determines it."""

import functools
import gzip
import hashlib
import importlib.metadata
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshard.plan.fit.hardware import GPU
from jshard.plan.program import Program
from jshard.system.compat import absent_gpus
from jshard.system.compat.versions import versions
from jshard.system.errors import warn
from jshard.system.files.atomic import replacing
from jshard.system.files.untrusted import parse_json

# Packages whose versions determine what a program compiles to.
_COMPILERS = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc-cu13",
)  # fmt: skip
_PLANNER = Path(__file__).parents[1]


def read_result(folder: Path, key: str) -> dict[str, Any] | None:
    """Returns the cached result of a key, or None; warns of a damaged file."""
    path = folder / f"{key}.json.gz"
    try:
        entry = parse_json(gzip.decompress(path.read_bytes()))
        if entry["key"] != key:
            raise ValueError(f"has the key {entry['key']!r}")
        return dict(entry["result"])
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        message = f"ignored a damaged cache file, and made its content again: {path}"
        warn(f"{message} ({error!r})")
        return None


def write_result(folder: Path, key: str, result: dict[str, Any]) -> None:
    """Caches a result; warns if it cannot be written."""
    path = folder / f"{key}.json.gz"
    text = json.dumps({"key": key, "result": result})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:  # estimates of a topology are 7 MB of text
            file.write(gzip.compress(text.encode(), compresslevel=1))
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
    return hash_of(parts)


def step_key(
    digest: str, values: Mapping[str, Any], topology: str, gpu: GPU, sources: str
) -> str:
    """Returns a hash of what determines all results of a job on a topology.

    Args:
      digest: of the step as given. It changes with the shapes of the data, and with
        files that the model is read from.
      values: of the config as given. What a search varies is not in the key.
      topology: "h100:64".
      gpu: that of the topology, with its constants.
      sources: ``hash_of_sources``, for what the recipe does with other settings.
    """
    parts = {
        "step": digest,
        "values": {key: str(value) for key, value in values.items()},
        "topology": topology,
        "gpu": repr(gpu),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "sources": sources,
    }
    return hash_of(parts)


def hash_of(parts: Mapping[str, Any]) -> str:
    """Returns a hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _planner_hash() -> str:
    files = [*sorted(_PLANNER.rglob("*.py")), Path(str(absent_gpus.__file__))]
    return _hash_of_files(files)


def hash_of_sources() -> str:
    """Returns a hash of jshard, of loaded modules, and of all that is installed."""
    packages = sorted(
        f"{x.name} {x.version}" for x in importlib.metadata.distributions()
    )
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple({f"{sysconfig.get_path(kind)}{os.sep}" for kind in kinds})
    jshard = _PLANNER.parent
    loaded = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {Path(x) for x in loaded if x and not x.startswith(installed)}
    files = {x for x in files if x.is_file() and jshard not in x.parents}
    files |= {*jshard.rglob("*.py")}
    return hash_of({"packages": packages, "files": _hash_of_files(sorted(files))})


def _hash_of_files(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()

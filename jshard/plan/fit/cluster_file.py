"""A user's own cluster: a TOML file that says how it differs from a known GPU's."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jshard.plan.fit.hardware import GPU, GPUS
from jshard.plan.fit.toml_file import read_toml
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

SUFFIX = ".toml"
_PORT = 400.0  # Gb/s of the port that `GPU.port` counts in
# By key: the GPU's field, and what a value is.
_KEYS = {
    "memory": ("memory", "bytes per GPU, as CUDA reports them"),
    "memory_bandwidth": ("bandwidth", "bytes/s"),
    "flops": ("flops", "FLOP/s of dense bf16 products"),
    "link": ("link", "bytes/s in one direction to other GPUs of the host"),
    "network": ("port", "Gb/s in one direction for each GPU"),
    "gpus_per_host": ("host", "a whole number"),
    "gpus_per_domain": ("domain", "a whole number: of the GPUs that NVLink joins"),
}
_WHOLE = ("memory", "gpus_per_host", "gpus_per_domain")


def read_cluster(path: Path) -> GPU:
    """Reads a cluster's GPU: that of the key ``gpu``, with what the file says of it.

    Raises:
      UserError: The file cannot be read, or has unknown keys or impossible values.
    """
    found = read_toml("--topology", path)
    for key, value in found.items():
        if key != "gpu":
            _check(path, key, value)
    name = found.pop("gpu", None)
    if not isinstance(name, str) or name.lower() not in GPUS:
        raise UserError(
            f"--topology={path}: gpu = {name!r} must name the GPU that these are most "
            f"like: {', '.join(GPUS)}"
        )
    gpu = GPUS[name.lower()]
    fields = {_KEYS[key][0]: value for key, value in found.items()}
    if "port" in fields:
        fields["port"] /= _PORT
    gpu = gpu.on_hosts(fields.get("host", gpu.host))
    gpu = dataclasses.replace(gpu, **fields, source=path.name)
    if gpu.domain % gpu.host:
        raise UserError(
            f"--topology={path}: gpus_per_domain = {gpu.domain} must be a multiple of "
            f"the {gpu.host} GPUs of a host"
        )
    return gpu


def _check(path: Path, key: str, value: Any) -> None:
    if key not in _KEYS:
        hint = did_you_mean(key, ["gpu", *_KEYS])
        raise UserError(
            f"--topology={path}: unknown key {key!r}{hint}; possible: gpu, "
            f"{', '.join(_KEYS)}"
        )
    whole = key in _WHOLE
    good = isinstance(value, int if whole else int | float)
    if isinstance(value, bool) or not good or not (0 < value < math.inf):
        raise UserError(
            f"--topology={path}: {key} = {value!r} must be {_KEYS[key][1]}, above 0"
        )

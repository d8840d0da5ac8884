"""Frozen parameters that checkpoints leave out, because they came from elsewhere.

A run that trains some parameters beside a pretrained model would write the whole model
again with every checkpoint. Instead its checkpoints name the source of the frozen
parameters, which is read again, with a number for each array that shows whether the
source has changed.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.sharding.cpu.order import in_order
from jshard.sharding.layout.memory_kinds import on_device
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.metadata import FROZEN_FROM as KEY
from jshard.system.errors import UserError, some_of

PREFIX = "frozen."  # of the names of frozen parameters


def is_frozen(name: str) -> bool:
    """Returns whether an array of a checkpoint is a frozen parameter."""
    return name.startswith(PREFIX)


def source_of(folder: Path) -> str | None:
    """Returns where the frozen parameters of a checkpoint are, if not in it.

    That is a path, the URL of a step in a bucket, or a name on the Hugging Face Hub
    with its commit.
    """
    about = metadata.read(folder)
    return about[KEY]["path"] if KEY in about else None


def left_out(content: dict[str, Any], source: str, sums: dict[str, str]) -> dict:
    """Returns metadata of a checkpoint without frozen parameters.

    Args:
      content: What ``metadata.describe`` returns.
      source: Where they came from.
      sums: What ``bit_sums`` returns.
    """
    arrays = content["arrays"]
    kept = {name: entry for name, entry in arrays.items() if not is_frozen(name)}
    return content | {"arrays": kept, KEY: {"path": source, "bit_sums": sums}}


def bit_sums(state: TrainState) -> dict[str, str]:
    """Returns the dtype of each frozen parameter and the sum of its bits, by name.

    Each value counts as unsigned integers of 16 bits, and sums are modulo 2**32: they
    are the same on every mesh. A complex number is two values, and one of fewer than 8
    bits counts as a float32.
    """
    arrays = metadata.arrays_by_name(state)
    arrays = {name: x for name, x in arrays.items() if is_frozen(name)}

    def total(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        elif jnp.issubdtype(x.dtype, jnp.complexfloating):
            x = jnp.stack([x.real, x.imag])
        elif x.dtype == bool:
            x = x.astype(jnp.uint8)
        elif jax.dtypes.itemsize_bits(x.dtype) < 8:
            x = x.astype(jnp.float32)
        width = jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16
        bits = lax.bitcast_convert_type(on_device(x), width)
        return jnp.sum(bits, dtype=jnp.uint32)

    sums = jax.jit(in_order(lambda arrays, step: list(map(total, arrays))))
    found = jax.device_get(sums(list(arrays.values()), state.step))
    return {
        name: f"{x.dtype} {bits}"
        for (name, x), bits in zip(arrays.items(), found, strict=True)
    }


def check_unchanged(folder: Path, about: dict[str, Any], state: TrainState) -> None:
    """Raises UserError if frozen parameters are not those of a checkpoint.

    Those that are kept in another dtype than they were then are not compared.

    Args:
      folder: The checkpoint's folder.
      about: Its metadata.
      state: With parameters that were read from the source.
    """
    source, then = about[KEY]["path"], about[KEY]["bit_sums"]
    differ = [
        name
        for name, now in bit_sums(state).items()
        if name in then
        and now != then[name]
        and now.split()[0] == then[name].split()[0]
    ]
    if differ:
        raise UserError(
            f"checkpoint {folder} was trained beside other frozen parameters than "
            f"those of {source}: {some_of(differ, limit=3)} differ; give the folder "
            "that they came from: --config.checkpoint.restore=DIR to train, --base=DIR "
            "to generate"
        )

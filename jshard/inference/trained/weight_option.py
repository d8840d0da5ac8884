"""Where the weights of a trained model are read to: a shard or all to each device."""

import jax

from jshard.inference.generation.weight_placement import Placement, replicated, sharded
from jshard.inference.trained.model_command import note
from jshard.inference.trained.trained_model import TrainedModel
from jshard.sharding.layout.capacity import device_limit, host_bytes
from jshard.system.cli.options import Option
from jshard.system.errors import UserError
from jshard.system.formatting import format_bytes

WEIGHTS = Option(
    "auto",
    "whether each device holds all weights or a shard of them; auto replicates them "
    "if they fit and there is one process",
    choices=("auto", "replicated", "sharded"),
)
_FREE = 0.4  # of a device's memory for the weights: they are copied once, and the cache


def place_weights(model: TrainedModel, weights: str, rows: int) -> Placement:
    """Reads the weights to where they fit, and says which on standard error.

    ``weights`` is a value of ``WEIGHTS``, and ``rows`` the most texts that are read at
    a time.

    Raises:
      UserError: Several processes are to have all weights, or these cannot be read.
    """
    devices, size = jax.devices(), model.bytes()
    alone = jax.process_count() == 1
    if weights == "replicated" and not alone:
        raise UserError(
            "--weights=replicated: the weights of several processes are always "
            "sharded; start one process"
        )
    local = jax.local_devices()
    memory = device_limit(local) or host_bytes() // len(local)  # which CPUs share
    fits = size <= memory * _FREE
    whole = alone and (fits or len(devices) == 1)
    if weights == "replicated" or (weights == "auto" and whole):
        used = devices[:rows]
        where = f"on each of {len(used)} devices" if len(used) > 1 else "on one device"
        note(f"weights: {format_bytes(size)}, whole {where}")
        return replicated(model.load_whole(used[0]), used)
    why = "" if fits else f", as {format_bytes(size)} is too much for one"
    count = f"{len(devices)} devices" if len(devices) > 1 else "one device"
    note(f"weights: sharded over {count}{why}")
    return sharded(*model.load(devices))

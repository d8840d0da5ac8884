"""Steps of processes that a signal ends; apart, because they import little."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jshard.training.callbacks.preemption import Preemption


def step_until_signalled(name: str) -> tuple[int, str | None]:
    """Both processes step together, by a sum over both, until they agree to stop.

    The second one signals itself after its tenth step, and again after the agreed one.
    """
    second = jax.process_index() == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spread = NamedSharding(jax.make_mesh((2,), ("all",)), PartitionSpec("all"))
    ones = jax.make_array_from_process_local_data(spread, np.ones(1, np.float32))
    add = jax.jit(jnp.sum)
    step = 0
    with Preemption() as preemption:
        while step == 0 or not preemption.requested(step):
            step += 1
            add(ones).block_until_ready()
            time.sleep(0.01)
            if second and step == 10:
                os.kill(os.getpid(), getattr(signal, name))
        if second:
            os.kill(os.getpid(), signal.SIGTERM)
        add(ones).block_until_ready()
        time.sleep(0.1)  # alive, and could save
    return step, preemption.signal_name

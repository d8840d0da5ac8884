"""A step that the processes of a job begin together, however long each compiles it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh

from jshard.system.compat.coordination import compile_together, processes_of


class Together:
    """A jitted function of a state and a batch, with its attributes.

    Before a batch of new shapes each process compiles, and waits for the others.
    """

    def __init__(self, jitted: Any, mesh: Any):
        """Wraps what ``jax.jit`` returned, for arrays on a mesh."""
        self._function = jitted
        abstract = isinstance(mesh, AbstractMesh)
        self._processes = () if abstract else processes_of(mesh.devices.flat)
        self._compiled: set[Any] = set()  # shapes of batches
        functools.update_wrapper(self, jitted)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Runs the function."""
        if self._processes:
            self._compile(state, batch)
        return self._function(state, batch)

    def _compile(self, state: Any, batch: Any) -> None:
        leaves, structure = jax.tree.flatten(batch)
        if any(isinstance(x, Tracer) for x in (state.step, *leaves)):
            return
        kind = structure, *((np.shape(x), jnp.result_type(x)) for x in leaves)
        if kind not in self._compiled:
            compile_together(self._function, self._processes, state, batch)
            self._compiled.add(kind)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the jitted function."""
        return getattr(self._function, name)

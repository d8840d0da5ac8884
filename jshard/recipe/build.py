"""What a recipe and its config make: the mesh, the sharding and the train step."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from jshard.data.dataset import first_example
from jshard.data.examples import count_items
from jshard.recipe import contract
from jshard.recipe.config.policy_keys import parse_options
from jshard.recipe.config.settings import MeshSettings
from jshard.recipe.configured import Configured
from jshard.sharding.layout.batch import abstract_batch as of_all_processes
from jshard.sharding.settings import mesh as meshes
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import Step, TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.system.compat import xla_options


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe on a mesh, before anything is allocated."""

    configured: Configured
    fsdp: FSDP
    optimizer: optax.GradientTransformation
    make_model: Callable[..., Any]  # of `rngs`
    trainable: Any  # an NNX filter
    train_step: Step[Any]

    def abstract_state(self) -> TrainState:
        """Returns the state as `ShapeDtypeStruct`s."""
        return self.fsdp.abstract_state(
            self.make_model, self.optimizer, wrt=self.trainable
        )

    def initial_state(self, frozen: Any = None) -> TrainState:
        """Returns the state before the first step, on the devices (``FSDP.init``)."""
        return self.fsdp.init(
            self.make_model,
            self.optimizer,
            self.configured.settings.seed,
            self.trainable,
            frozen,
        )


def make_mesh(
    settings: MeshSettings,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """Makes the mesh of a run; `hosts` is the host of each process, if known."""
    sizes = {axis: getattr(settings, axis) for axis in meshes.AXES}
    return meshes.make_mesh(**sizes, devices=devices, hosts=hosts)


def write_mesh(config: ConfigDict, mesh: Mesh) -> None:
    """Sets the keys of `config.mesh` to the sizes of a mesh, for the record."""
    config.mesh.fsdp = mesh.shape[meshes.FSDP]
    for axis in (meshes.EXPERT, meshes.CONTEXT, meshes.TENSOR, meshes.PIPE):
        config.mesh[axis] = mesh.shape.get(axis, 1)
    with config.mesh.ignore_type():
        config.mesh.replica = mesh.shape[meshes.REPLICA]


def make_job(
    configured: Configured,
    mesh: Mesh | AbstractMesh,
    policy: Policy | None = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Job:
    """Sets up a recipe on a mesh; with an abstract mesh, the step can only be traced.

    The policy and the optimizer are those of the config, unless they are given.

    Raises:
      UserError: The config asks for something impossible.
    """
    recipe, config = configured.recipe, configured.config
    options = parse_options(configured.settings.compiler_options)
    if configured.settings.deterministic:
        options = xla_options.deterministic(options)
    fsdp = FSDP(
        mesh,
        policy or configured.policy,
        units=configured.units(),
        tensor_splits=configured.tensor_splits(),
        sequences=configured.sequences(),
        compiler_options=options,
    )
    if optimizer is None:
        optimizer = contract.make_optimizer(recipe.make_optimizer, config)
    return job_on(fsdp, configured, optimizer)


def job_on(
    fsdp: FSDP, configured: Configured, optimizer: optax.GradientTransformation
) -> Job:
    """Sets up a recipe on the mesh of an ``FSDP``, to train with an optimizer."""
    recipe, config = configured.recipe, configured.config
    return Job(
        configured,
        fsdp,
        optimizer,
        partial(recipe.make_model, config),
        contract.trainable(recipe.trainable, config),
        fsdp.train_step(recipe.loss_fn, optimizer, configured.settings.seed),
    )


def abstract_batch(
    configured: Configured, mesh: Mesh | AbstractMesh
) -> tuple[Any, int, str]:
    """Returns a global batch without values, the number of its items, and their unit.

    The items are tokens or examples.
    """
    size = configured.settings.batch_size
    example = first_example(configured.training_data())

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        dtype = np.asarray(x).dtype
        if dtype.kind in "iuf":  # int64 is int32, of which JAX 0.12 warns here
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct((size, *np.shape(x)), dtype)

    sequences = configured.sequences()
    batch = of_all_processes(jax.tree.map(abstract, example), mesh, sequences)
    unit, items = count_items(jax.tree.map(lambda x: np.asarray(x)[None], example))
    return batch, items * size, unit

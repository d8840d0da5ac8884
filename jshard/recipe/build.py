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
from jshard.recipe.config.policy_keys import make_policy, parse_options
from jshard.recipe.config.settings import RunSettings, settings_of
from jshard.recipe.data import make_training_data
from jshard.recipe.definition import Recipe
from jshard.sharding.layout.batch import abstract_batch as of_all_processes
from jshard.sharding.settings import mesh as meshes
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import Step, TrainState
from jshard.sharding.step.fsdp import FSDP


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe on a mesh, before anything is allocated."""

    recipe: Recipe
    config: ConfigDict  # which the recipe's functions get
    settings: RunSettings  # its other keys
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
            self.make_model, self.optimizer, self.settings.seed, self.trainable, frozen
        )


def make_mesh(
    config: ConfigDict,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """Makes the mesh of a config; `hosts` is the host of each process, if known."""
    sizes = {axis: config.mesh[axis] for axis in meshes.AXES}
    return meshes.make_mesh(**sizes, devices=devices, hosts=hosts)


def write_mesh(config: ConfigDict, mesh: Mesh) -> None:
    """Sets the keys of `config.mesh` to the sizes of a mesh, for the record."""
    config.mesh.fsdp = mesh.shape[meshes.FSDP]
    for axis in (meshes.EXPERT, meshes.CONTEXT, meshes.TENSOR, meshes.PIPE):
        config.mesh[axis] = mesh.shape.get(axis, 1)
    with config.mesh.ignore_type():
        config.mesh.replica = mesh.shape[meshes.REPLICA]


def make_job(
    recipe: Recipe,
    config: ConfigDict,
    mesh: Mesh | AbstractMesh,
    policy: Policy | None = None,
) -> Job:
    """Sets up a recipe on a mesh; with an abstract mesh, the step can only be traced.

    The policy is that of the config, unless one is given.

    Raises:
      UserError: The config asks for something impossible.
    """
    settings = settings_of(config)
    options = parse_options(settings.compiler_options)
    units = recipe.units(config) if recipe.units else ()
    policy = policy or make_policy(config)
    fsdp = FSDP(
        mesh,
        policy,
        units=units,
        tensor_splits=recipe.tensor_splits(config) if recipe.tensor_splits else None,
        sequences=recipe.sequences(config) if recipe.sequences else None,
        compiler_options=options,
    )
    optimizer = contract.make_optimizer(recipe.make_optimizer, config)
    train_step = fsdp.train_step(recipe.loss_fn, optimizer, settings.seed)
    make_model = partial(recipe.make_model, config)
    trainable = contract.trainable(recipe.trainable, config)
    return Job(
        recipe, config, settings, fsdp, optimizer, make_model, trainable, train_step
    )


def abstract_batch(
    recipe: Recipe, config: ConfigDict, mesh: Mesh | AbstractMesh
) -> tuple[Any, int, str]:
    """Returns a global batch without values, the number of its items, and their unit.

    The items are tokens or examples.
    """
    example = first_example(make_training_data(recipe.make_data, config))

    def abstract(x: Any) -> jax.ShapeDtypeStruct:
        shape = (config.batch_size, *np.shape(x))
        return jax.ShapeDtypeStruct(shape, np.asarray(x).dtype)

    sequences = recipe.sequences(config) if recipe.sequences else None
    batch = of_all_processes(jax.tree.map(abstract, example), mesh, sequences)
    unit, items = count_items(jax.tree.map(lambda x: np.asarray(x)[None], example))
    return batch, items * config.batch_size, unit

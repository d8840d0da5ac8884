"""What a recipe and its config make: the mesh, the sharding, the step that trains."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

import jshard
from jshard.training import returns
from jshard.training.config.config import Config
from jshard.training.config.policy import make_policy, parse_options
from jshard.training.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Job:
    """A recipe on a mesh, before anything is allocated.

    Attributes:
      recipe: what to train.
      config: its config, with every shared key.
      fsdp: how it is sharded.
      optimizer: the recipe's.
      make_model: makes the model from random streams.
      train_step: the jitted step.
    """

    recipe: Recipe
    config: Config
    fsdp: jshard.FSDP
    optimizer: optax.GradientTransformation
    make_model: Callable[..., Any]
    train_step: jax.stages.Wrapped

    def abstract_state(self) -> jshard.TrainState:
        """The state, nothing allocated."""
        return self.fsdp.abstract_state(self.make_model, self.optimizer)


def make_mesh(
    config: Config,
    devices: Sequence[Any] | None = None,
    hosts: Sequence[int] | None = None,
) -> Mesh:
    """The mesh that `config.mesh` describes.

    Args:
      config: with every shared key.
      devices: by default all there are.
      hosts: the host of each process, where that is known.
    """
    return jshard.make_mesh(
        replica=config.mesh.replica, fsdp=config.mesh.fsdp, devices=devices, hosts=hosts
    )


def make_job(recipe: Recipe, config: Config, mesh: Mesh | AbstractMesh) -> Job:
    """Sets a recipe up on a mesh.

    Args:
      recipe: what to train.
      config: its config, with every shared key.
      mesh: of the devices to train on; an abstract one can be traced for.

    Raises:
      UserError: the config asks for what cannot be.
    """
    options = parse_options(config.compiler_options)
    units = recipe.units(config) if recipe.units else ()
    fsdp = jshard.FSDP(mesh, make_policy(config), units=units, compiler_options=options)
    optimizer = returns.make_optimizer(recipe.make_optimizer, config)
    train_step = fsdp.train_step(recipe.loss_fn, optimizer)
    make_model = partial(recipe.make_model, config)
    return Job(recipe, config, fsdp, optimizer, make_model, train_step)

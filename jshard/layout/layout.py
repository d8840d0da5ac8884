"""Where every array of a state lives, and how each parameter travels."""

import dataclasses
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard.errors import UserError
from jshard.layout.memory_kinds import HOST, on_host
from jshard.layout.placement import Placement
from jshard.layout.specs import follow, manual_specs, param_spec, sharded_dim
from jshard.mesh import FSDP
from jshard.policy import Policy
from jshard.state import ModelArrays, TrainState

Path = tuple[Any, ...]  # of a variable in the model


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where every array of a state lives: computed once, for all who need to know.

    Shapes decide, those of the global arrays: a state and its abstract form have the
    same layout.

    Attributes:
      policy: what is sharded, in which dtypes it travels, and what is offloaded.
      mesh: what the state is sharded over, a Mesh or an AbstractMesh.
      places: the Placement of every parameter, trained or frozen, by its path.
      specs: the state with a PartitionSpec for each array.
    """

    policy: Policy
    mesh: Any
    places: dict[Path, Placement]
    specs: TrainState

    @classmethod
    def of(cls, state: TrainState, policy: Policy, mesh: Any) -> Self:
        """The layout of a state, concrete, abstract or traced."""
        trained = _places(state.params, policy, mesh, trainable=True)
        places = trained | _places(state.frozen, policy, mesh, trainable=False)

        def specs(params: nnx.State) -> nnx.State:
            def spec(path: Path, variable: nnx.Variable) -> nnx.Variable:
                return variable.copy(param_spec(variable, places[path].dim, mesh))

            return nnx.map_state(spec, params)

        # What of the optimizer's state follows a parameter is sharded like it.
        params = specs(state.params)
        find = follow(state.params, jax.tree.leaves(params))
        replicated = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        all_specs = dataclasses.replace(
            state,
            step=PartitionSpec(),
            params=params,
            frozen=specs(state.frozen),
            model_state=replicated(state.model_state),
            opt_state=jax.tree_util.tree_map_with_path(
                lambda path, leaf: find(path, leaf) or PartitionSpec(), state.opt_state
            ),
            ema=None if state.ema is None else specs(state.ema),
            loss_scale=replicated(state.loss_scale),
        )
        return cls(policy, mesh, places, all_specs)

    # On the devices.

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array, memory kind included.

        Arrays that are sharded are offloaded. Replicated ones are small, and stay.
        """

        def put(tree: Any, offloaded: bool) -> Any:
            def sharding(spec: PartitionSpec) -> NamedSharding:
                kind = HOST if offloaded and FSDP in spec else None
                return NamedSharding(self.mesh, spec, memory_kind=kind)

            return jax.tree.map(sharding, tree)

        streamed, fetched = (
            self.policy.offload is not None,
            self.policy.offload == "all",
        )
        return dataclasses.replace(
            put(self.specs, False),
            params=put(self.specs.params, fetched),
            frozen=put(self.specs.frozen, fetched),
            opt_state=put(self.specs.opt_state, streamed),
            ema=put(self.specs.ema, streamed),
        )

    def abstract(self, state: TrainState) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state,
            self.shardings,
        )

    def constrain(self, state: TrainState) -> TrainState:
        """The state of a step, traced, on the shards where it is to stay."""
        return jax.tree.map(
            lambda x, spec: jax.lax.with_sharding_constraint(
                x, NamedSharding(self.mesh, spec)
            ),
            state,
            self.specs,
        )

    def check_memory(self, state: TrainState) -> None:
        """Raises UserError unless the arrays are in the memory that a step expects."""
        places = jax.tree.leaves(self.shardings)
        for x, place in zip(jax.tree.leaves(state), places, strict=True):
            if on_host(x) != (place.memory_kind == HOST):
                memory = "host" if on_host(x) else "device"
                raise UserError(
                    f"policy.offload is {self.policy.offload!r}, but the state has "
                    f"arrays in {memory} memory that should not be there; make (or "
                    "restore) the state with the same policy"
                )

    # In shard_map.

    @property
    def local_specs(self) -> ModelArrays:
        """Specs of the arrays that ``shard_map`` hands to each device."""
        replicated: Any = PartitionSpec()
        params, frozen = self.specs.params, self.specs.frozen
        return ModelArrays(manual_specs(params), manual_specs(frozen), replicated)

    def places_of(self, params: nnx.State) -> nnx.State:
        """The Placements of these parameters, in a tree like theirs."""
        return nnx.map_state(lambda path, v: v.copy(self.places[path]), params)

    def gathered(self) -> Self:
        """The layout of a device's parameters once they are gathered."""
        whole = {
            path: Placement(None, trainable=place.trainable)
            for path, place in self.places.items()
        }
        return dataclasses.replace(self, places=whole)


def _places(
    params: nnx.State, policy: Policy, mesh: Any, *, trainable: bool
) -> dict[Path, Placement]:
    places = {}
    for path, variable in nnx.to_flat_state(params):
        precision = policy.precision_at(path)
        dim = sharded_dim(variable, policy, mesh)
        places[path] = Placement(
            dim,
            precision.gather,
            precision.compute,
            precision.reduce,
            precision.sum,
            trainable,
            hosted=policy.offload == "all" and dim is not None,
        )
    return places

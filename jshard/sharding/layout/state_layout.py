"""The layout of a state: shardings and memory kinds, and parameter placements."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jshard.sharding.layout.four_bit.base import four_bit_of
from jshard.sharding.layout.memory_kinds import HOST, on_host
from jshard.sharding.layout.padding import PADDING, pad, padding_now, padding_of
from jshard.sharding.layout.placement import Gradient, Part, Placement, Sharding, Weight
from jshard.sharding.layout.specs import (
    follow,
    is_sharded,
    manual_specs,
    param_spec,
    sharded_dim,
    sharded_over,
)
from jshard.sharding.layout.splits import WHOLE, Parts, Split, find_splits
from jshard.sharding.layout.variables import own_dtypes
from jshard.sharding.settings.mesh import mesh_axes, names_of, shard_axes, stages_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import Precision, is_float, is_quantized
from jshard.sharding.settings.state import ModelArrays, TrainState
from jshard.system.errors import UserError

Path = tuple[Any, ...]  # The path of a variable in the model.


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sharding and memory kind of every array of a state.

    It depends on the paths, metadata and global shapes of the arrays, not on their
    values, so a state and its abstract form have the same layout.

    Attributes:
      policy: the policy that sets what is sharded or offloaded, and the dtypes that are
        communicated.
      mesh: the Mesh or AbstractMesh that the state is sharded over.
      places: the Placement of every parameter, trained or frozen, by path.
      specs: the state with a PartitionSpec in place of each array.
      stages: how a Stack's layers are divided among the stages of a pipeline; None of a
        state, and without one.
      sequences: the names of a batch's sequences, as of ``FSDP``.
    """

    policy: Policy
    mesh: Any
    places: dict[Path, Placement]
    specs: TrainState
    stages: Any = None
    sequences: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        state: TrainState,
        policy: Policy,
        mesh: Any,
        tensor_splits: Mapping[tuple[str, ...], Split] | None = None,
    ) -> Self:
        """Returns the layout of a concrete, abstract or traced state.

        ``tensor_splits`` are those of modules that declare none (``FSDP``).
        """
        parts = find_splits(state, mesh, tensor_splits or {})
        shared = parts, own_dtypes(state, policy), policy, mesh
        trained = _places(state.params, *shared, trainable=True)
        frozen = _places(state.frozen, *shared, trainable=False)
        places = trained | frozen

        def specs(params: nnx.State) -> nnx.State:
            spec = lambda path, v: v.copy(param_spec(v, places[path], mesh))
            return nnx.map_state(spec, params)

        # Optimizer state that belongs to a parameter is sharded like that parameter.
        params = specs(state.params)
        find = follow(state.params, jax.tree.leaves(params))
        replicated = lambda tree: jax.tree.map(lambda _: PartitionSpec(), tree)
        spec_of = lambda path, leaf: find(path, leaf) or PartitionSpec()
        all_specs = dataclasses.replace(
            state,
            step=PartitionSpec(),
            params=params,
            frozen=specs(state.frozen),
            model_state=replicated(state.model_state),
            opt_state=jax.tree.map_with_path(spec_of, state.opt_state),
            ema=None if state.ema is None else specs(state.ema),
            loss_scale=replicated(state.loss_scale),
        )
        return cls(policy, mesh, places, all_specs)

    # Outside of shard_map: global arrays.

    @property
    def shardings(self) -> TrainState:
        """The sharding of each array, including its memory kind.

        Only sharded arrays are offloaded. Replicated arrays are small and stay in
        device memory.
        """

        def put(tree: Any, offloaded: bool) -> Any:
            def sharding(spec: PartitionSpec) -> NamedSharding:
                kind = HOST if offloaded and is_sharded(spec) else None
                return NamedSharding(self.mesh, spec, memory_kind=kind)

            return jax.tree.map(sharding, tree)

        streamed = self.policy.offload is not None
        fetched = self.policy.offload == "all"
        return dataclasses.replace(
            put(self.specs, False),
            params=put(self.specs.params, fetched),
            frozen=put(self.specs.frozen, fetched),
            opt_state=put(self.specs.opt_state, streamed),
            ema=put(self.specs.ema, streamed),
        )

    def abstract(self, state: TrainState) -> TrainState:
        """Returns the state as ShapeDtypeStructs with shardings."""
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state,
            self.shardings,
        )

    def constrain(self, state: TrainState) -> TrainState:
        """Constrains a traced state to the layout's specs."""
        places = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return jax.lax.with_sharding_constraint(state, places)

    def check_memory(self, state: TrainState) -> None:
        """Raises UserError if an array is not in the memory that a step expects."""
        places = jax.tree.leaves(self.shardings)
        for x, place in zip(jax.tree.leaves(state), places, strict=True):
            if on_host(x) != (place.memory_kind == HOST):
                memory = "host" if on_host(x) else "device"
                raise UserError(
                    f"policy.offload is {self.policy.offload!r}, but the state has "
                    f"arrays in {memory} memory that should not be there; make (or "
                    "restore) the state with the same policy"
                )

    # Inside shard_map: the arrays of one device.

    @property
    def local_specs(self) -> ModelArrays:
        """The specs of the arrays that ``shard_map`` passes to each device."""
        params, frozen = self.specs.params, self.specs.frozen
        params, frozen = (manual_specs(x, self.mesh) for x in (params, frozen))
        replicated: Any = PartitionSpec()
        return ModelArrays(params, frozen, replicated)

    def places_of(self, params: nnx.State) -> nnx.State:
        """Returns the Placements of ``params`` as a state of the same structure."""
        return nnx.map_state(lambda path, v: v.copy(self.places[path]), params)

    def whole(self) -> Self:
        """Returns the layout of a step whose devices have no sequences in common.

        There each layer needs its full weights, whatever the model declares to be
        split.
        """
        places = {
            path: dataclasses.replace(
                place, part=dataclasses.replace(place.part, whole=True)
            )
            for path, place in self.places.items()
        }
        return dataclasses.replace(self, places=places)

    def gathered_once(self, path: Path) -> bool:
        """Returns whether a step gathers a parameter once, for all micro-batches."""
        if self.stages is None or not self.stages.has(path):
            return self.policy.defer_scatter
        reshard = self.policy.unit(self.stages.path).reshard_after_forward
        return self.policy.defer_scatter or reshard is False

    def gathered(self) -> Self:
        """Returns the layout of a step, in which some parameters are gathered."""
        gathered = {
            path: _gathered(place) if self.gathered_once(path) else place
            for path, place in self.places.items()
        }
        return dataclasses.replace(self, places=gathered)


def _gathered(place: Placement) -> Placement:
    """Returns the placement of a gathered weight, whose gradient is not summed yet."""
    weight = dataclasses.replace(place.weight, gather=None, compute=None)
    gradient = Gradient(place.gradient.trainable)
    return Placement(Sharding(None), place.part, weight, gradient)


def padded(
    state: TrainState,
    policy: Policy,
    mesh: Any,
    tensor_splits: Mapping[tuple[str, ...], Split],
) -> TrainState:
    """Returns a new state with its parameters padded where the shards do not divide."""
    parts = find_splits(state, mesh, tensor_splits)

    def mark(path: Path, variable: nnx.Variable) -> nnx.Variable:
        _, padding = sharded_dim(variable, policy, mesh, parts.get(path, WHOLE))
        if padding == padding_of(variable):
            return variable
        return variable.copy(**{PADDING: padding})

    params, frozen = (
        pad(nnx.map_state(mark, tree), mesh) for tree in (state.params, state.frozen)
    )
    return dataclasses.replace(state, params=params, frozen=frozen)


def _places(
    params: nnx.State,
    found: Mapping[Path, Parts],
    own: Mapping[Path, Any],
    policy: Policy,
    mesh: Any,
    *,
    trainable: bool,
) -> dict[Path, Placement]:
    places = {}
    for path, variable in nnx.to_flat_state(params):
        dtype = variable.get_value().dtype
        precision = policy.precision_at(path, own.get(path))
        four_bit = four_bit_of(variable)
        decoded_to = four_bit and (precision.compute or jnp.dtype(four_bit.dtype))
        if not jnp.issubdtype(dtype, jnp.floating):  # complex, or integers
            precision = Precision()
        parts = found.get(path, WHOLE)
        dim, padding = sharded_dim(variable, policy, mesh, parts)
        name, field = ".".join(map(str, path)), "params" if trainable else "frozen"
        if padding != padding_of(variable):
            raise UserError(
                f"parameter {name!r} of the state is not sharded for this mesh "
                f"{dict(mesh.shape)}; make or restore the state with the FSDP whose "
                f"steps take it, or put other values into one: state = fsdp.put(state, "
                f"{field}=values)"
            )
        if padding is not None and padding_now(variable) is None:
            raise UserError(
                f"parameter {name!r} of the state was set to an array without padding "
                f"(a dimension of {padding.shape[padding.dim]} to {padding.size}); "
                f"fsdp.put adds it: state = fsdp.put(state, {field}=values)"
            )
        gather = precision.gather
        if isinstance(variable, nnx.LoRAParam) and is_quantized(gather):
            gather = precision.compute
        over = sharded_over(parts, mesh)
        apart = {axis for _, axis in parts.splits}
        apart |= set() if dim is None else set(names_of(over or shard_axes(mesh)))
        # A replicated parameter's gradient is summed once, at the end of the step, and
        # so is what micro-batches add up.
        once = dim is None or policy.accumulate > 1 or policy.defer_scatter
        once = once or stages_of(mesh) > 1
        places[path] = Placement(
            Sharding(
                dim,
                exact=padding and (padding.dim, padding.shape[padding.dim]),
                hosted=policy.offload == "all" and dim is not None,
                over=over,
            ),
            part=Part(splits=parts.splits, on_rank_zero=parts.on_rank_zero),
            weight=Weight(
                gather=gather,
                compute=precision.compute or dtype,
                float8=precision.products,
                four_bit=four_bit,
                decoded_to=decoded_to,
            ),
            gradient=Gradient(
                reduce=precision.reduce,
                sum=precision.sum,
                sum_over=tuple(
                    a for a in mesh_axes(mesh) if a not in apart and mesh.shape[a] > 1
                ),
                sum_at="step" if once else "unit",
                trainable=trainable and is_float(variable.get_value()),
            ),
        )
    return places

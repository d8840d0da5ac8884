"""FSDP: makes sharded states and the jitted steps that train and evaluate them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshard import describe, step
from jshard.checks import (
    check_batch,
    check_layer_counts,
    check_trained,
    check_units,
    warn_of_large_root,
)
from jshard.comm.order import in_order
from jshard.comm.pacing import Paced
from jshard.compat import xla_options
from jshard.given import check_optimizer, check_unit_types, existing, from_seed
from jshard.layout import transfer
from jshard.layout.initial_values import make, mark_stacked, prepare
from jshard.layout.layout import Layout
from jshard.layout.memory_kinds import check_memory, on_device, typed_as_device
from jshard.mesh import AXES, BATCH, check_mesh, platform
from jshard.mesh import FSDP as FSDP_AXIS
from jshard.nn.loss import Means
from jshard.optim import ema, loss_scale
from jshard.optim.update import next_state
from jshard.policy import Policy
from jshard.precision import for_update
from jshard.state import ModelArrays, TrainState
from jshard.unit import modules
from jshard.unit.batch_norm import of_one_device
from jshard.unit.loop_types import typed_loops
from jshard.unit.remat import checked_names

STARTED = ("step", "opt_state", "ema", "loss_scale")  # of a state, besides its model


class FSDP:
    """Fully sharded data-parallel training on a mesh.

    Args:
      mesh: a mesh with axes "replica" and "fsdp" (``jshard.make_mesh``); the steps of
        an abstract one (``mesh.abstract_mesh``) can be traced.
      policy: what is gathered, kept and reduced, and in which dtypes.
      units: module types whose instances become Units, the model unedited. As a
        mapping it says how many leading dimensions of a type's variables count layers
        that ``nnx.vmap`` stacked: ``{Block: 1, nnx.Linear: 0}``.
      compiler_options: options of XLA for the jitted steps, over those that jshard
        gives them on GPUs (``jshard.compat.xla_options``); None leaves an option
        to XLA.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        policy: Policy | None = None,
        *,
        units: Sequence[type] | Mapping[type, int] = (),
        compiler_options: Mapping[str, Any] | None = None,
    ):
        # What needs devices is not for an abstract one.
        self.mesh: Any = check_mesh(mesh)
        self.policy = policy or Policy()
        self.policy.check_groups(mesh.shape[FSDP_AXIS])
        check_memory(self.policy, mesh)
        self.units = check_unit_types(units)
        self.layer_dims = dict(units) if isinstance(units, Mapping) else {}
        self.compiler_options = xla_options.compiler_options(
            platform(mesh), compiler_options
        )

    # States.

    def init(
        self,
        make_model: Callable[[nnx.Rngs], nnx.Module],
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        wrt: Any = nnx.Param,
    ) -> TrainState:
        """Makes a state whose arrays are born as shards.

        The whole tree never exists on any device or on the host, and the values do
        not depend on the mesh. Arrays in host memory (``Policy.offload``) are made on
        the device a few at a time.

        Args:
          make_model: makes the model from random streams.
          optimizer: any optax transformation.
          seed: of the random streams.
          wrt: an NNX filter; the parameters it selects are trained.

        Raises:
          UserError: the model has no parameters that ``wrt`` selects, or an override
            of the policy matches no module.
        """
        check_optimizer(optimizer)
        create = functools.partial(self._create, from_seed(make_model), optimizer, wrt)
        seed_array = jnp.asarray(seed, jnp.uint32)
        abstract = self._abstract(create, seed_array)
        leaves, structure = jax.tree.flatten(abstract)

        # Arrays alone: a model made again has another structure where it holds a
        # function that is made with it (an initializer, a lambda).
        def arrays(seed: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(create(seed))

        made = make(self._in_order(arrays), (seed_array,), leaves)
        return jax.tree.unflatten(structure, made)

    def shard(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        wrt: Any = nnx.Param,
    ) -> TrainState:
        """Makes a state of a model that exists: pretrained, with adapters, say.

        It is the state of ``init``, with the model's values in place of new ones. They
        are copied to the devices shard by shard, and are in no program; the optimizer's
        state is made as shards. The model stays as it is, and may be dropped.

        Args:
          model: with full arrays, in numpy or on devices of this process; with several
            processes, the same in each.
          optimizer: any optax transformation.
          wrt: an NNX filter; the parameters it selects are trained
            (``nnx.LoRAParam``, say). The others are sharded and stay.

        Raises:
          UserError: as ``init``, or the model does not hold full arrays.
        """
        check_optimizer(optimizer)
        merge, values = existing(model)
        create = functools.partial(self._create, merge, optimizer, wrt)
        abstract = self._abstract(create, values)

        def rest(step: jax.Array, params: nnx.State) -> list[jax.Array]:
            params = jax.tree.map(on_device, params)
            return jax.tree.leaves(self._start(optimizer, params, step))

        params = transfer.put_state(values, abstract.params)
        started = {name: getattr(abstract, name) for name in STARTED}
        leaves, structure = jax.tree.flatten(started)
        inputs = (jnp.zeros((), jnp.int32), params)
        made = make(self._in_order(rest), inputs, leaves)
        return dataclasses.replace(
            abstract,
            params=params,
            frozen=transfer.put_state(values, abstract.frozen),
            model_state=transfer.put_state(values, abstract.model_state),
            **jax.tree.unflatten(structure, made),
        )

    def abstract_state(
        self,
        make_model: Callable[[nnx.Rngs], nnx.Module],
        optimizer: optax.GradientTransformation,
        wrt: Any = nnx.Param,
    ) -> TrainState:
        """The state of ``init`` as ShapeDtypeStructs with shardings.

        Nothing is allocated. Raises as ``init`` does.
        """
        check_optimizer(optimizer)
        create = functools.partial(self._create, from_seed(make_model), optimizer, wrt)
        return self._abstract(create, jnp.zeros((), jnp.uint32))

    def _abstract(self, create: Callable[[Any], TrainState], inputs: Any) -> TrainState:
        shapes = jax.eval_shape(create, inputs)
        check_trained(shapes.params)
        model = self._abstract_model(shapes)
        layout = Layout.of(shapes, self.policy, self.mesh)
        warn_of_large_root(model, shapes, layout)
        return layout.abstract(shapes)

    def _create(
        self, make: Callable[[Any], nnx.Module], optimizer: Any, wrt: Any, inputs: Any
    ) -> TrainState:
        model = make(inputs)
        check_units(model, self.units)
        is_parameter = nnx.filterlib.to_predicate((wrt, nnx.Param))
        mark_stacked(model, self.layer_dims, is_parameter)
        prepare(model, self.policy, self.mesh, self.units, is_parameter)
        graphdef, params, frozen, model_state = nnx.split(model, wrt, nnx.Param, ...)
        return TrainState(
            params=params,
            frozen=frozen,
            model_state=model_state,
            graphdef=graphdef,
            **self._start(optimizer, params, jnp.zeros((), jnp.int32)),
        )

    def _start(self, optimizer: Any, params: nnx.State, step: jax.Array) -> dict:
        """What a state holds besides its model, before the first step."""
        return {
            "step": step,
            "opt_state": optimizer.init(for_update(params)),
            "ema": None if self.policy.ema_decay is None else ema.start(params),
            "loss_scale": loss_scale.start() if self.policy.loss_scale else None,
        }

    # Steps.

    def train_step(
        self,
        loss_fn: Callable[[Any, Any], Any],
        optimizer: optax.GradientTransformation,
    ) -> jax.stages.Wrapped:
        """The jitted step ``state, metrics = train_step(state, batch)``.

        The state is donated. Metrics are scalars: "loss", "grad_norm" (before the
        optimizer's own clipping), and the Means that ``loss_fn`` names.

        Args:
          loss_fn: ``loss_fn(model, batch)`` on one device's examples, returning a
            ``Mean``, a weighted sum of Means, or ``(that, {"name": Mean})``.
          optimizer: the transformation the state was made with.

        Raises:
          UserError: (when called) the batch does not divide, the loss is no Mean, or
            the state and the policy do not agree on averages or on a loss scale.
        """
        policy = self.policy

        def train_step(
            state: TrainState, batch: Any
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            check_batch(batch, self.mesh, accumulate=policy.accumulate)
            loss_scale.check(state.loss_scale, policy.loss_scale)
            layout = self._layout(state)
            of_model = layout.gathered() if policy.defer_scatter else layout
            local = functools.partial(
                step.train,
                step.builder(state.graphdef, self.units, of_model, training=True),
                modules.with_root(loss_fn, policy.reshard_root),
                layout,
            )
            specs, same = layout.local_specs, PartitionSpec()
            run = self._shard_map(
                local, (specs, BATCH, same), (specs.params, same, same)
            )
            scale = state.loss_scale and state.loss_scale.scale
            with checked_names():
                grads, metrics, model_state = run(state.model_arrays, batch, scale)
            new, more = next_state(layout, optimizer, state, grads, model_state)
            return layout.constrain(new), metrics | more

        return self._jit(train_step, donate_argnums=0)

    def eval_step(self, loss_fn: Callable[[Any, Any], Any]) -> jax.stages.Wrapped:
        """The jitted ``means = eval_step(state, batch)``, the model in eval mode.

        Results of several batches add: ``(a + b).compute()`` is a dict of floats.
        """

        def eval_step(state: TrainState, batch: Any) -> Means:
            check_batch(batch, self.mesh)
            layout = self._layout(state)
            local = functools.partial(
                step.evaluate,
                step.builder(state.graphdef, self.units, layout, training=False),
                modules.with_root(loss_fn, False),
            )
            inputs = (layout.local_specs, BATCH)
            run = self._shard_map(local, inputs, PartitionSpec())
            return Means(*run(state.model_arrays, batch))

        return self._jit(eval_step)

    def predict_step(self, fn: Callable[[Any, Any], Any]) -> jax.stages.Wrapped:
        """The jitted ``outputs = predict_step(state, batch)``, in eval mode.

        ``fn(model, batch)`` maps one device's examples to arrays with the same leading
        dimension; the outputs are those of the global batch.
        """

        def predict_step(state: TrainState, batch: Any) -> Any:
            check_batch(batch, self.mesh)
            layout = self._layout(state)
            build = step.builder(state.graphdef, self.units, layout, training=False)
            predict = modules.with_root(fn, False)

            def local(arrays: ModelArrays, batch: Any) -> Any:
                return predict(build(*arrays), batch)

            run = self._shard_map(local, (layout.local_specs, BATCH), BATCH)
            return run(state.model_arrays, batch)

        return self._jit(predict_step)

    def _jit(self, step: Callable, **kwargs: Any) -> jax.stages.Wrapped:
        options = self.compiler_options or None
        jitted = jax.jit(self._in_order(step), compiler_options=options, **kwargs)
        return Paced(jitted) if self._on_cpus else jitted  # pyright: ignore[reportReturnType]

    def _in_order(self, fn: Callable) -> Callable:
        return in_order(fn) if self._on_cpus else fn

    @property
    def _on_cpus(self) -> bool:
        return self.mesh.size > 1 and platform(self.mesh) == "cpu"

    def _layout(self, state: TrainState) -> Layout:
        """The layout of a step's state, which must be where the step expects it."""
        layout = Layout.of(state, self.policy, self.mesh)
        layout.check_memory(state)
        return layout

    def _abstract_model(self, state: TrainState) -> nnx.Module:
        """The model over abstract values, with its Units, for inspection."""
        model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
        modules.make_units(model, self.units)
        found = {path: module for path, module in nnx.iter_modules(model) if path}
        units = [path for path, module in found.items() if modules.is_unit(module)]
        stacks = [path for path in units if isinstance(found[path], modules.Stack)]
        self.policy.check_overrides(found, units, stacks)
        check_layer_counts(self.policy, model)
        return model

    def _shard_map(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        specs = {"in_specs": in_specs, "out_specs": out_specs}

        def local(*args: Any) -> Any:
            with typed_loops():
                return fn(*args)

        run = jax.shard_map(local, mesh=self.mesh, axis_names=set(AXES), **specs)
        return lambda *args: run(*jax.tree.map(typed_as_device, args))

    # Data in and out.

    def shard_batch(self, local_batch: Any) -> Any:
        """Global arrays from this process's part of the batch, (examples, ...) each.

        Raises:
          UserError: the examples do not divide by the mesh's devices.
        """
        check_batch(local_batch, self.mesh, processes=jax.process_count())
        sharding = NamedSharding(self.mesh, BATCH)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
            local_batch,
        )

    def model(self, state: TrainState) -> nnx.Module:
        """An ordinary module over the state's (global, sharded) arrays."""
        model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
        for _, module in list(nnx.iter_modules(model)):
            of_one_device(module)
        return model

    def unshard(self, tree: Any) -> Any:
        """Full values on the host: the same tree with numpy arrays, leaf by leaf.

        Typed random keys, which numpy does not have, become their data.
        """
        return jax.tree.map(transfer.fetch, tree)

    def describe(
        self,
        state: TrainState,
        batch: Any,
        train_step: Any,
        hosts: Sequence[int] | None = None,
    ) -> str:
        """What a step will do, in a few lines.

        Devices and mesh, parameters in all and on a device, the collectives of a step
        with their bytes, and what stays replicated and why.

        Args:
          state: the state, or an abstract one.
          batch: one process's part of a batch, or abstract arrays like a global one.
          train_step: of this FSDP; it is traced, which its first call then need not do.
          hosts: the host of each process, as for ``make_mesh``.
        """
        traced = train_step.trace(state, describe.global_batch(batch, self.mesh))
        layout, model = self._layout(state), self._abstract_model(state)
        return describe.describe(layout, state, model, traced.jaxpr.jaxpr, hosts)

"""FSDP: makes sharded states, and the jitted steps that train and evaluate them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard.sharding.cpu.order import in_order
from jshard.sharding.cpu.pacing import pace
from jshard.sharding.layout.batch import check_fields, check_sequences, split_batch
from jshard.sharding.layout.capacity import check_capacity
from jshard.sharding.layout.memory_kinds import check_memory, on_device
from jshard.sharding.layout.padding import pad
from jshard.sharding.layout.splits import Split
from jshard.sharding.layout.state_layout import Layout
from jshard.sharding.layout.values import transfer
from jshard.sharding.layout.values.initial_values import fill
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.callers_mesh import in_own_mesh, own_mesh
from jshard.sharding.settings.loss import Means
from jshard.sharding.settings.mesh import check_mesh, named_sizes, platform, shards_of
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.state import ModelArrays, Step, TrainState, check_kept
from jshard.sharding.step import checks, given
from jshard.sharding.step.program import new_state
from jshard.sharding.step.program.together import Together
from jshard.sharding.step.step import Steps
from jshard.sharding.units.model import of_one_device
from jshard.sharding.update import nnx_optimizer
from jshard.sharding.update.end_of_step import first_fields
from jshard.system.compat import xla_options


class FSDP:
    """Fully sharded data-parallel training on a mesh.

    Args:
      mesh: a mesh of ``jshard.make_mesh``; Explicit axes are made Auto. With an
        abstract one (``mesh.abstract_mesh``), steps can be traced but not run.
      policy: what is recomputed, gathered and kept, and in which dtypes.
      units: module types whose instances become Units, without editing the model. A
        mapping also says how many leading dimensions of a type's variables count layers
        that ``nnx.vmap`` stacked: ``{Block: 1, nnx.Linear: 0}``.
      tensor_splits: how to split modules over a "tensor" axis, by their paths
        ("blocks.attention"), for a model that does not declare this itself.
      sequences: the names, dotted within trees, of a batch's (examples, sequence, ...)
        arrays, which "context" and "tensor" split. A single array need not be named.
      compiler_options: XLA options for the jitted steps, which override jshard's
        (``jshard.system.compat.xla_options``); None leaves an option to XLA.

    Raises:
      UserError: the mesh lacks an axis, the policy does not fit it, or units no types.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        policy: Policy | None = None,
        *,
        units: Sequence[type] | Mapping[type, int] = (),
        tensor_splits: Mapping[str, Split] | None = None,
        sequences: Sequence[str] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ):
        mesh = self.mesh = check_mesh(mesh)
        self.policy: Policy = policy or Policy()
        self.policy.check_groups(shards_of(mesh, split=True))
        splits = tensor_splits or {}
        self.tensor_splits = {tuple(x.split(".")): split for x, split in splits.items()}
        self.sequences = check_sequences(sequences)
        check_memory(self.policy, mesh)
        checks.check_precisions(self.policy, mesh)
        self.units = given.check_unit_types(units)
        self.layer_dims = dict(units) if isinstance(units, Mapping) else {}
        self.told: set[str] = set()  # warnings; a state is shaped, and then made
        model = self.units, self.tensor_splits, self.sequences
        self._steps = Steps(mesh, self.policy, *model)
        float8 = bool(self.policy.products())
        options = platform(mesh), mesh.size, compiler_options
        self.compiler_options = xla_options.compiler_options(*options, float8=float8)

    def __repr__(self) -> str:
        units = ", ".join(unit.__name__ for unit in self.units) or "none named"
        return f"FSDP({named_sizes(self.mesh.shape)}; units: {units}; {self.policy!r})"

    # States.

    @in_own_mesh
    def init(
        self,
        make_model: Callable[[nnx.Rngs], nnx.Module],
        optimizer: optax.GradientTransformation,
        seed: int = 0,
        wrt: Any = nnx.Param,
        frozen: Any = None,
    ) -> TrainState:
        """Creates a state directly as shards.

        Full parameters never exist on a device or on the host, and values do not depend
        on the mesh. Host arrays (``Policy.offload``) are made on devices, some at once.

        Args:
          make_model: makes the model from random streams.
          optimizer: any optax transformation.
          seed: the seed of the random streams, from 0 to 2**32 - 1.
          wrt: an NNX filter that selects the parameters to train.
          frozen: that field of ``abstract_state``, with arrays to take in place of
            initial values.

        Raises:
          UserError: ``wrt`` selects no parameters, the optimizer does not keep layers
            apart, an override matches no module, or the memory is too small.
        """
        create = new_state.creator(self, given.from_seed(make_model), optimizer, wrt)
        seed_array = given.checked_seed(seed)
        abstract = new_state.abstract(self, create, seed_array, optimizer)
        check_capacity(abstract, self.mesh.local_devices)
        if frozen is not None:
            abstract = dataclasses.replace(abstract, frozen=frozen)
        return fill(abstract, create, (seed_array, frozen), self._in_order)

    @own_mesh()
    def from_model(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation | nnx.Optimizer,
        wrt: Any = nnx.Param,
    ) -> TrainState:
        """Creates a state from an existing model, such as a pretrained one.

        The state is like that of ``init``, but with the model's values, which are
        copied to the devices shard by shard. The model is not changed, and may be
        deleted.

        Args:
          model: a model with full arrays, in numpy or on devices of this process; the
            same in each process. Modules keep their modes, as of ``model.eval()``.
          optimizer: any optax transformation; or the ``nnx.Optimizer`` of the model,
            whose moments and step go on. Its ``tx`` alone would start anew. Steps are
            given ``optimizer.tx``.
          wrt: an NNX filter that selects the parameters to train, such as
            ``nnx.LoRAParam``. The other parameters are sharded and stay as they are.

        Raises:
          UserError: as ``init``; the model does not hold full arrays; the
            ``nnx.Optimizer`` trains other parameters than ``wrt`` selects.
        """
        merge, values = given.existing(model)
        tx = nnx_optimizer.transformation(optimizer)
        create = new_state.creator(self, merge, tx, wrt)
        abstract = new_state.abstract(self, create, values, tx)
        check_capacity(abstract, self.mesh.local_devices)
        abstract = nnx_optimizer.taken_over(optimizer, values, abstract)

        def start(step: jax.Array, params: nnx.State) -> dict[str, Any]:
            params = jax.tree.map(on_device, params)
            return first_fields(self.policy, self.mesh, tx, params, step)

        put = functools.partial(transfer.put_state, values)
        arrays = ModelArrays(*map(put, abstract.model_arrays))
        fields = ("step", "opt_state", "ema", "loss_scale")
        inputs = (jnp.zeros((), jnp.int32), arrays.params)
        rest = {name: getattr(abstract, name) for name in fields}
        rest = fill(rest, start, inputs, self._in_order)
        return dataclasses.replace(abstract, **arrays._asdict(), **rest)

    @in_own_mesh
    def abstract_state(
        self,
        make_model: Callable[[nnx.Rngs], nnx.Module],
        optimizer: optax.GradientTransformation,
        wrt: Any = nnx.Param,
    ) -> TrainState:
        """Returns the state of ``init`` as ShapeDtypeStructs with shardings.

        Nothing is allocated. Raises the errors of ``init``.
        """
        create = new_state.creator(self, given.from_seed(make_model), optimizer, wrt)
        return new_state.abstract(self, create, jnp.zeros((), jnp.uint32), optimizer)

    # Steps.

    def train_step(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        seed: int = 0,
    ) -> Step[tuple[TrainState, dict[str, jax.Array]]]:
        """Returns the jitted step ``state, metrics = train_step(state, batch)``.

        The state is donated. Metrics are scalars: "loss", "grad_norm" (before the
        optimizer clips gradients), and the Means that ``loss_fn`` names.

        Args:
          loss_fn: ``loss_fn(model, batch)``, called with one device's examples, returns
            a ``Mean``, a weighted sum of Means, or ``(that, {"name": Mean})``. An
            argument ``rngs`` gets ``nnx.Rngs`` that do not depend on the mesh.
          optimizer: the transformation that the state was made with. One that takes
            more than gradients (``optax.contrib.reduce_on_plateau``) is given
            ``value=``, the loss.
          seed: of ``rngs``, which are new in each step.

        Raises:
          UserError: not a transformation; or (when called) examples do not divide, the
            loss is not made of Means, the state was made with other ones or donated.
        """
        given.check_optimizer(optimizer)
        seed = int(given.checked_seed(seed))
        run = functools.partial(self._steps.train, loss_fn, seed, optimizer)
        return self._jit("train_step", run, donate_argnums=0)

    def eval_step(
        self, loss_fn: Callable[..., Any], seed: int = 0, *, examples: int | None = None
    ) -> Step[Means]:
        """Returns the jitted ``means = eval_step(state, batch)``, in eval mode.

        Results of batches can be added: ``(a + b).compute()`` is a dict of floats.
        Of a batch of one example for each device, the first ``examples`` count, and the
        others fill it up (docs/concepts/losses.md). The rest is as for ``train_step``.
        """
        seed = int(given.checked_seed(seed))
        run = functools.partial(self._steps.evaluate, loss_fn, seed, examples)
        return self._jit("eval_step", run)

    def predict_step(
        self, fn: Callable[..., Any], *, donate_batch: bool = False
    ) -> Step[Any]:
        """Returns the jitted ``outputs = predict_step(state, batch)``, in eval mode.

        Args:
          fn: ``fn(model, batch)`` maps one device's examples to arrays with the same
            leading dimension; the outputs are those of the global batch. Sequences are
            whole: on a mesh with a "context" axis, examples are split over it, too.
          donate_batch: whether outputs take the memory of the batch.
        """
        run = functools.partial(self._steps.predict, fn, 0)
        return self._jit("predict_step", run, donate_argnums=(1,) * donate_batch)

    def _jit(self, name: str, run: Any, **options: Any) -> Step:
        """Jits ``run(state, batch)``, a program of this name."""
        run.__name__ = name
        options["compiler_options"] = self.compiler_options or None
        jitted = Together(jax.jit(self._in_order(run), **options), self.mesh)
        return Step(jitted, self.mesh, check_fields, pace if self._on_cpus else None)

    def _in_order(self, fn: Callable) -> Callable:
        return in_order(fn) if self._on_cpus else fn

    @property
    def _on_cpus(self) -> bool:
        return self.mesh.size > 1 and platform(self.mesh) == "cpu"

    # Data in and out.

    def shard_batch(self, local_batch: Any) -> Any:
        """Makes global arrays from this process's part of a batch, (examples, ...).

        An array of typed random keys has a key an example. A scalar, which may be a
        key, stays whole, the same for every example of every process and micro-batch.

        "context" and "tensor" split ``sequences`` along their second dimension.
        Processes that share sequences all pass them whole.

        Raises:
          UserError: examples or sequences are not divisible by the mesh's devices; it
            is not said which are sequences; a field is text, objects or a list.
        """
        return split_batch(local_batch, self.mesh, self.sequences)

    def shard_examples(self, local_batch: Any) -> Any:
        """Makes global arrays for ``predict_step``, in which sequences are whole.

        Raises:
          UserError: the number of examples is not divisible by the mesh's devices.
        """
        return split_batch(local_batch, self.mesh, whole=True)

    def model(self, state: TrainState, train: bool | None = None) -> nnx.Module:
        """Returns an ordinary module over the state's global, sharded arrays.

        What is padded in the state (shards do not divide it) is whole on each device,
        and what is in 4 bits is decoded; within ``jax.set_mesh`` of Explicit axes
        everything is whole, as Flax's layers need it. Modules are in eval mode if
        ``train`` is False and in train mode if True; by default as they were made.

        Raises:
          UserError: the state was donated, or the mesh set has other devices.
        """
        check_kept(state)
        arrays = transfer.as_read(state.model_arrays, self.mesh)
        model = of_one_device(nnx.merge(state.graphdef, *arrays, copy=True))
        return given.in_mode(model, train)

    def to_optimizer(
        self,
        state: TrainState,
        optimizer: optax.GradientTransformation,
        wrt: Any = nnx.Param,
    ) -> nnx.Optimizer:
        """Returns the ``nnx.Optimizer`` of ``model(state)``: the way back.

        Its arrays are like those of that model: global and sharded, without padding.

        Args:
          state: a state.
          optimizer: the transformation that it was made with.
          wrt: the filter that it was made with.

        Raises:
          UserError: the state was made with others, or was donated to a train step.
        """
        given.check_optimizer(optimizer)
        model = self.model(state)
        return nnx_optimizer.given_back(model, optimizer, wrt, state, self.mesh)

    @own_mesh()
    def put(self, state: TrainState, **fields: Any) -> TrainState:
        """Returns the state with other values in some fields: the inverse of ``fetch``.

        ``fsdp.put(state, params=values)`` takes what ``fetch(state.params)`` returned,
        changed. The rest stays. What is in 4 bits is rounded to them again.

        Args:
          state: a state.
          **fields: full values of these fields, the same in each process.

        Raises:
          UserError: paths, shapes or dtypes are not the state's, or it was donated.
        """
        check_kept(state)
        whole = jax.eval_shape(lambda: pad(state, None))
        layout = Layout.of(whole, self.policy, self.mesh, self.tensor_splits)
        return transfer.put_fields(state, layout.abstract(whole), fields)

    def fetch(self, tree: Any) -> Any:
        """Returns the full values on the host, as a tree of numpy arrays.

        Typed random keys become their key data.

        Raises:
          UserError: the tree is of a state that was donated to a train step.
        """
        check_kept(tree)
        return jax.tree.map(transfer.fetch_exact, tree, is_leaf=is_variable)

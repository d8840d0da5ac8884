"""TrainState: everything that a step reads and writes, as one pytree."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jshard.sharding.settings.callers_mesh import all_on, given_back, own_mesh, taken
from jshard.system.compat.programs.lines import is_of_product
from jshard.system.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The state of a dynamic loss scale.

    Attributes:
      scale: float32 scalar, a power of two.
      good_steps: int32 scalar, finite steps since it was doubled or the last overflow.
      skipped: int32 scalar, total number of skipped steps.
      borne: int32 scalar, overflows since it was doubled that did not halve it.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    borne: jax.Array


class ModelArrays(NamedTuple):
    """The model's arrays in a TrainState: global arrays, or one device's shards."""

    params: nnx.State[Any, Any]
    frozen: nnx.State[Any, Any]
    model_state: nnx.State[Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of training: sharded arrays, and the model's structure.

    Attributes:
      step: int32 scalar, number of steps so far. The optimizer's counts, in its
        state, are fewer if steps made no update, and more if it was restored.
      params: the trained parameters (selected by ``wrt``), an ``nnx.State``.
      frozen: the other parameters; sharded and gathered, but never changed.
      model_state: batch statistics, random streams, and the like; replicated.
      opt_state: the optimizer's state; moments are sharded like their parameters.
      graphdef: the model's structure, static.
      ema: averages of ``params`` (``Policy.ema_decay``), sharded like them, in float32
        or wider; otherwise None.
      loss_scale: the dynamic loss scale (``Policy.loss_scale``), or None.
    """

    step: jax.Array
    params: nnx.State[Any, Any]
    frozen: nnx.State[Any, Any]
    model_state: nnx.State[Any, Any]
    opt_state: Any
    graphdef: nnx.GraphDef[Any] = dataclasses.field(metadata={"static": True})
    ema: nnx.State[Any, Any] | None = None
    loss_scale: LossScale | None = None

    @property
    def model_arrays(self) -> ModelArrays:
        """The arrays that, with ``graphdef``, make the model."""
        return ModelArrays(self.params, self.frozen, self.model_state)

    def flat_params(self) -> list[tuple[tuple, Any]]:
        """Returns (path, variable) of the trained, then of the frozen parameters."""
        return [*nnx.to_flat_state(self.params), *nnx.to_flat_state(self.frozen)]

    @own_mesh()
    def copy(self) -> "TrainState":
        """Returns a state with arrays of its own, which train steps do not reuse.

        ``copy.deepcopy`` does the same.

        Raises:
          UserError: the state was donated to a train step.
        """
        check_kept(self)

        def own(x: Any) -> Any:
            if not isinstance(x, jax.Array):
                return x
            if x.is_fully_addressable:
                return jax.device_put(x, x.sharding, may_alias=False)
            here = [shard.data for shard in x.addressable_shards]
            copies = [jax.device_put(y, y.sharding, may_alias=False) for y in here]
            return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)

        return jax.tree.map(own, self)

    def __deepcopy__(self, memo: dict) -> "TrainState":
        """Returns ``copy()``."""
        return self.copy()

    @own_mesh()
    def with_ema_params(self) -> "TrainState":
        """Returns this state with the averages as its parameters, cast to their dtypes.

        For evaluation, prediction and export; steps compiled for this state can be
        used. Everything else stays as it is.

        Raises:
          UserError: the state has no averages, or was donated to a train step.
        """
        check_kept(self)
        if self.ema is None:
            raise UserError(
                "the state has no averages of its parameters; "
                "train with jshard.Policy(ema_decay=...)"
            )

        # A copy, because a step must not donate one buffer twice. Both the average
        # and the parameter may be in host memory.
        def copy(average: jax.Array, param: jax.Array) -> jax.Array:
            here = jax.device_put(average, jax.memory.Space.Device)
            new = jnp.array(here, param.dtype, copy=True)
            return jax.device_put(new, jax.typeof(param).memory_space)

        params = jax.tree.map(copy, self.ema, self.params)
        return dataclasses.replace(self, params=params)


def check_kept(tree: Any) -> None:
    """Raises UserError if arrays of a state, or of a part of it, were donated."""
    if _is_donated(tree):
        raise UserError(
            "the state was donated to a train step, which reused its memory; go on "
            "with the state that the step returned: state, metrics = train_step(state, "
            "batch), and give the step state.copy() to keep this one"
        )


def _is_donated(tree: Any) -> bool:
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return any(x.is_deleted() for x in arrays if not isinstance(x, Tracer))


_DEBUGGED = {"jax_debug_nans": jnp.isnan, "jax_debug_infs": jnp.isinf}


def _debugged(fn: Callable, options: list[str]) -> Callable:
    """Returns a step that does what options of JAX ask for, on its results.

    JAX itself would run the step again and again, and not find the operation.
    """

    def run(*args: Any) -> Any:
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs = fn(*args)
            for path, x in jax.tree_util.tree_leaves_with_path(outputs):
                if isinstance(x, Tracer) or not jnp.issubdtype(x.dtype, jnp.inexact):
                    continue
                x = jax.device_put(x, jax.memory.Space.Device)
                for option in options:
                    if _DEBUGGED[option](x).any():
                        raise FloatingPointError(
                            f"{option}: the step returned {option[10:-1]} in result"
                            f"{jax.tree_util.keystr(path)}; within a step no operation "
                            "is named: docs/how_to/nan.md says how to find it"
                        )
        return outputs

    return run


Result = TypeVar("Result", covariant=True)


class Step(Generic[Result]):
    """A jitted step that refuses a state or a batch that was donated.

    JAX itself may end the process (SIGSEGV: 0.10.2, eight CPU devices). It runs on the
    mesh that it was made for, and other attributes (``lower``, ``trace``) are those of
    the jitted function there.
    """

    def __init__(
        self, jitted: Any, mesh: Any, check: Callable, after: Callable | None = None
    ):
        """Wraps what ``jax.jit`` returned.

        ``check`` is given each batch, and ``after`` each result.
        """
        self._jitted, self._check, self._after = jitted, check, after
        self.mesh = mesh
        functools.update_wrapper(self, jitted)

    def __call__(self, state: TrainState, batch: Any) -> Result:
        """Runs the step.

        Arrays may be on any mesh of the same devices. Within ``jax.set_mesh`` of
        Explicit axes, results but the state are on that mesh.

        Raises:
          UserError: state or batch was donated, is none or is on other devices, a
            layer left an array outside of its call, or these devices cannot compute
            in a dtype.
        """
        if not isinstance(state, TrainState):
            name = type(state).__name__
            raise UserError(f"a step takes the state of fsdp.init, not a {name}")
        arrays = jax.tree.leaves(state)  # once: it takes Python for each of them
        check_kept(arrays)
        self._check(batch)
        if _is_donated(batch):
            raise UserError(
                "the batch was donated to a predict step (donate_batch=True), which "
                "reused its memory; make it again with fsdp.shard_examples"
            )
        debugged = [x for x in _DEBUGGED if getattr(jax.config, x)]
        run = _debugged(self._jitted, debugged) if debugged else self._jitted
        with own_mesh(self.mesh) as callers:
            if not all_on(arrays, self.mesh):
                state = taken(state, self.mesh, "state")
            batch = taken(batch, self.mesh, "batch")
            with in_one_line():
                outputs = run(state, batch)
            if self._after is not None:
                self._after(outputs)
            is_state = lambda x: isinstance(x, TrainState)
            return jax.tree.map(
                lambda x: x if is_state(x) else given_back(x, callers),
                outputs,
                is_leaf=is_state,
            )

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the jitted function; methods run as the step does."""
        found = getattr(self._jitted, name)
        if not callable(found):
            return found

        @own_mesh(self.mesh)
        def run(*args: Any, **kwargs: Any) -> Any:
            args = taken(args, self.mesh, name)
            with in_one_line():
                return found(*args, **kwargs)

        return run


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """Makes a UserError of what JAX refuses when it lowers a step."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(
            "an array that a layer in units=, or a function that JAX traced, put "
            "into a global or another object outside is read after the call; "
            "return it, or put it into a list or dict that is an argument"
        ) from error
    except ValueError as error:
        if not is_of_product(error):
            raise
        raise UserError(
            f"the step has a product that these devices do not compute (JAX: {error}); "
            "float16 has it in attention, for one: compute in bfloat16 or float32 "
            "(precision.compute, or the model's dtype)"
        ) from error

"""A parameter inside a step: this device's shard, in place of the full weight.

In a step's model, the Variable of each parameter holds a Shard. A unit reads the shard
itself (``shard_of``), gathers it when the unit is called, and drops the full weight
afterwards. Every other access gathers the full weight on the spot: ``variable[...]``,
arithmetic, ``jax.tree``, or a JAX or NNX transform of the module. As a pytree, the
Variable has the full weight as its leaf, so no model code can compute with a shard by
accident.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jshard.sharding.collectives.gather import all_gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.scopes import within
from jshard.system.compat.programs import lines
from jshard.system.errors import UserError

# (name, user's line) of each weight that what is being traced gathers outside of its
# unit, and the scope of that gather, by index.
_READS: ContextVar[list[tuple[str, str]]] = ContextVar("reads outside of units")
READ = "read {} outside of its unit"


@contextlib.contextmanager
def noting_reads() -> Iterator[list[tuple[str, str]]]:
    """Yields the list of what is traced inside: a weight's name, the user's line."""
    reads: list[tuple[str, str]] = []
    with within(_READS, reads):
        yield reads


# What a user sees of a Shard, outside of the unit that owns the parameter:
#
#   kernel[...], kernel + x, jnp.sum(kernel), kernel.T   the full weight, gathered
#   jax.tree, nnx.state, what transforms are handed      the full weight, gathered
#   kernel.shape, .dtype, .ndim, .size                   those of the full weight
#   kernel[...] = weight                                 is taken: no Shard is left
#   kernel[i] = x                                        UserError
#   kernel.get_raw_value()                               the Shard
#   a private attribute (kernel._x)                      AttributeError
#
# Shapes and dtypes gather nothing. A gather outside of a unit is told, once.


@dataclasses.dataclass(frozen=True)
class Shard:
    """The value of a parameter's Variable, in place of its array."""

    array: jax.Array  # this device's part
    place: Placement
    name: str  # the parameter's path

    def whole(self) -> jax.Array:
        """Returns the gathered weight, for a read outside the parameter's unit."""
        if self.place.sharding.dim is None:
            return self.gathered()
        reads = _READS.get()
        scope = READ.format(len(reads))
        reads.append((self.name, lines.line_here()))
        with jax.named_scope(scope):
            return self.gathered()

    def gathered(self) -> jax.Array:
        """Returns the gathered weight."""
        return self.place.decoded(all_gather(self.array, self.place))

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the weight, which is not gathered for them."""
        return jax.eval_shape(self.gathered)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = name in ("shape", "dtype", "ndim", "size")
        return getattr(self.type if known else self.whole(), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UserError(
            f"parameter {self.name!r} is changed in part outside of its unit, which "
            "holds a shard; set its whole value (kernel[...] = weight)"
        )

    def __jax_array__(self) -> jax.Array:
        return self.whole()


def _as_read(_: None, children: Any) -> Any:
    (whole,) = children
    return whole


jax.tree_util.register_pytree_node(Shard, lambda x: ((x.whole(),), None), _as_read)


class _Sharded(nnx.Variable):
    """A Variable that holds a Shard; its only leaf is the full weight.

    Its pytree is that of the original Variable, including key paths. A Shard as an
    inner pytree would make these longer.
    """

    def __init_subclass__(cls) -> None:
        unflatten = functools.partial(_unflatten, cls)
        jax.tree_util.register_pytree_with_keys(cls, _flatten, unflatten)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shard = shard_of(self)
        return super().shape if shard is None else shard.type.shape

    def set_value(self, value: Any, **index: Any) -> None:
        """Sets the value; all of it with the index ``...``, too."""
        shard = shard_of(self)
        if shard is not None and _is_whole(index.get("index", 0)):
            # Flax writes into an array, of which nothing is left.
            self.set_raw_value(jnp.zeros(shard.type.shape, shard.type.dtype))
        super().set_value(value, **index)


def _is_whole(index: Any) -> bool:
    """Returns whether an index selects all of any array."""
    parts = index if isinstance(index, tuple) else (index,)
    full = lambda part: isinstance(part, slice) and part == slice(None)
    return all(part is Ellipsis or full(part) for part in parts)


def _flatten(variable: nnx.Variable) -> tuple[tuple, tuple]:
    shard = shard_of(variable)
    whole = variable.get_raw_value() if shard is None else shard.whole()
    metadata = sorted(variable.get_metadata().items(), key=lambda item: item[0])
    return ((jax.tree_util.GetAttrKey("value"), whole),), tuple(metadata)


def _unflatten(cls: type[nnx.Variable], metadata: tuple, children: Any) -> Any:
    (whole,) = children
    return cls.from_metadata(whole, dict(metadata))


@functools.cache
def _sharded_class(cls: type) -> Any:
    return type(cls.__name__, (_Sharded, cls), {})


def as_shard(variable: nnx.Variable, place: Placement, name: str) -> nnx.Variable:
    """Returns a Variable like ``variable`` that holds its array as a Shard."""
    shard = Shard(variable.get_raw_value(), place, name)
    cls = _sharded_class(type(variable))
    return cls.from_metadata(shard, variable.get_metadata())


def as_full(variable: nnx.Variable, weight: Any) -> nnx.Variable:
    """Returns a Variable as the model made it, with the full weight of a Shard."""
    (_, plain) = type(variable).__bases__
    return plain.from_metadata(weight, variable.get_metadata())


def shard_of(variable: Any) -> Shard | None:
    """Returns the Shard that ``variable`` holds, or None."""
    if not isinstance(variable, nnx.Variable):
        return None
    value = variable.get_raw_value()
    return value if isinstance(value, Shard) else None


def is_shard(value: Any) -> bool:
    """Returns whether ``value`` is a Variable that holds a Shard."""
    return shard_of(value) is not None


def with_array(leaf: Any, array: Any) -> Any:
    """Returns ``leaf`` with ``array`` in its Shard, or the array if it has none."""
    shard = shard_of(leaf)
    if shard is None:
        return array
    # leaf.copy would read the new Shard, and so gather it.
    new = dataclasses.replace(shard, array=array)
    return type(leaf).from_metadata(new, leaf.get_metadata())

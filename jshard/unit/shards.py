"""A parameter inside a step: this device's shard, which reads as the whole weight.

A step's model holds a Shard in each Variable that is a parameter. A unit takes the
shard itself (``shard_of``), gathers it when it is called and drops it after. All
others, however they reach it (``variable[...]``, arithmetic, ``jax.tree``, a JAX or NNX
transform that is handed the module), get the whole weight, gathered there: to JAX, what
a Variable holds *is* the gathered weight. So nothing can compute with a shard.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
from flax import nnx

from jshard.comm.collectives import gather_leaf
from jshard.errors import UserError
from jshard.layout.placement import Placement


@dataclasses.dataclass(frozen=True)
class Shard:
    """What a Variable holds in place of its array.

    Attributes:
      array: this device's part.
      place: where the parameter lives, and how it travels.
      name: the parameter's path.
    """

    array: jax.Array
    place: Placement
    name: str

    def whole(self) -> jax.Array:
        """The gathered weight, as a unit would see it; a read from outside of one."""
        if self.place.dim is not None:
            warnings.warn(
                f"parameter {self.name!r} is read outside of its unit, or handed to a "
                "transform: it is gathered there, whole, each time; to gather once, "
                "read it from jshard.gathered(unit)",
                stacklevel=2,
            )
        return gather_leaf(self.array, self.place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UserError(
            f"parameter {self.name!r} is changed in part outside of its unit, which "
            "holds a shard; set its whole value"
        )

    def __jax_array__(self) -> jax.Array:
        return self.whole()


def _read(shard: Shard) -> tuple[tuple, None]:
    return (shard.whole(),), None


def _as_read(_: None, children: Any) -> Any:
    (whole,) = children
    return whole


jax.tree_util.register_pytree_node(Shard, _read, _as_read)


class _Sharded(nnx.Variable):
    """A Variable with a Shard, whose only leaf is the whole weight.

    Its tree is that of the Variable it was, key paths included, where a Shard as a tree
    of its own would add to them.
    """

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_keys, functools.partial(_unflatten, cls), _flatten
        )


def _whole(variable: nnx.Variable) -> Any:
    shard = shard_of(variable)
    return variable.get_raw_value() if shard is None else shard.whole()


def _metadata(variable: nnx.Variable) -> tuple:
    return tuple(sorted(variable.get_metadata().items(), key=lambda item: item[0]))


def _flatten(variable: nnx.Variable) -> tuple[tuple, tuple]:
    return (_whole(variable),), _metadata(variable)


def _flatten_with_keys(variable: nnx.Variable) -> tuple[tuple, tuple]:
    key = jax.tree_util.GetAttrKey("value")
    return ((key, _whole(variable)),), _metadata(variable)


def _unflatten(cls: type[nnx.Variable], metadata: tuple, children: Any) -> Any:
    (whole,) = children
    return cls.from_metadata(whole, dict(metadata))


@functools.cache
def _sharded_class(cls: type) -> type:
    return type(cls.__name__, (_Sharded, cls), {})


def hide(variable: nnx.Variable, place: Placement, name: str) -> None:
    """Makes the array that ``variable`` holds a Shard, in place."""
    variable.set_raw_value(Shard(variable.get_raw_value(), place, name))
    object.__setattr__(variable, "__class__", _sharded_class(type(variable)))


def show(variable: nnx.Variable) -> None:
    """Gives a Variable that holds the whole weight again the type that it had."""
    (_, plain) = type(variable).__bases__
    object.__setattr__(variable, "__class__", plain)


def shard_of(variable: Any) -> Shard | None:
    """The Shard that ``variable`` holds, if it does."""
    if not isinstance(variable, nnx.Variable):
        return None
    value = variable.get_raw_value()
    return value if isinstance(value, Shard) else None


def is_shard(value: Any) -> bool:
    """Whether ``value`` is a Variable that holds a Shard."""
    return shard_of(value) is not None


def array_of(leaf: Any) -> Any:
    """The shard's array of a Variable that holds one; else ``leaf`` itself."""
    shard = shard_of(leaf)
    return leaf if shard is None else shard.array


def with_array(leaf: Any, array: Any) -> Any:
    """``leaf`` with ``array`` where ``array_of`` found one."""
    shard = shard_of(leaf)
    if shard is None:
        return array
    # Not leaf.copy, which reads what it is given.
    new = dataclasses.replace(shard, array=array)
    return type(leaf).from_metadata(new, leaf.get_metadata())

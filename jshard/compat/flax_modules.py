"""What Flax records of a module's attributes, and of its class.

Tried on Flax 0.12.8 and 0.12.12. When it breaks, Units of modules that are no pytrees
cannot be made, nor states of models that ``qwix`` gave adapters.
"""

from typing import Any

from flax import nnx


def is_pytree(cls: type) -> bool:
    """Whether modules of this class are pytrees (``nnx.Module, pytree=False`` is not).

    A module that is none does not record which of its attributes hold arrays: a class
    derived from it has to be told.
    """
    return issubclass(cls, nnx.Pytree) and cls._pytree__is_pytree


def unrecorded(module: nnx.Module) -> dict[str, Any]:
    """The attributes of a pytree in which Flax does not look for arrays.

    Those set before the module was given a class that is a pytree: static, as Flax sees
    it, parameters too.
    """
    recorded: Any = module._pytree__nodes
    return {name: x for name, x in vars(module).items() if name not in recorded}

"""The metadata that Flax keeps about a module's attributes and class.

Tested with Flax 0.12.8 and 0.12.12. If it breaks, Units cannot be created from modules
that are not pytrees, nor states from models to which ``qwix`` added adapters.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx


def is_pytree(cls: type) -> bool:
    """Returns whether modules of this class are pytrees.

    Classes declared with ``pytree=False`` are not. Their modules do not record which
    attributes hold arrays, so a class derived from one must also pass ``pytree=False``.
    """
    return issubclass(cls, nnx.Pytree) and cls._pytree__is_pytree


def unrecorded(module: nnx.Module) -> dict[str, Any]:
    """Returns the attributes of a pytree module that Flax does not search for arrays.

    These were set before the module's class was changed to a pytree class. Flax treats
    them as static, even if they hold parameters.
    """
    recorded: Any = module._pytree__nodes
    return {name: x for name, x in vars(module).items() if name not in recorded}


def record(module: nnx.Module, names: Iterable[str]) -> Callable[[], None]:
    """Makes Flax search these attributes, too; returns a function that undoes it."""
    recorded: Any = module._pytree__nodes
    for name in names:
        setattr(module, name, nnx.data(vars(module)[name]))
    return functools.partial(object.__setattr__, module, "_pytree__nodes", recorded)

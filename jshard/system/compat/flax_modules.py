"""The metadata that Flax keeps about a module's attributes and class.

Tested with Flax 0.12.8 and 0.12.12. If it breaks, Units cannot be created from modules
that are not pytrees, nor states from models to which ``qwix`` added adapters.
"""

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from jshard.system.errors import UserError


class _Last:
    """Ends the calls of ``__init_subclass__`` after Flax's."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class Derived(nnx.Module, _Last, pytree=False):
    """The first base of every class that jshard derives from a user's module.

    Flax alone is told of such a class. An ``__init_subclass__`` of the user's, which
    may need keywords or keep a registry, is not called: there is no new kind of module.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super(nnx.Module, cls).__init_subclass__(**options)


def derived(name: str, bases: tuple[type, type], members: dict[str, Any]) -> Any:
    """Returns a class with a Derived and the class of a module as bases.

    Raises:
      UserError: the metaclass of the module does not allow it.
    """
    _, cls = bases
    # A module that is not a pytree does not record which attributes hold arrays.
    options = {"pytree": is_pytree(cls)}
    try:
        return types.new_class(name, bases, options, lambda ns: ns.update(members))
    except Exception as error:
        if type(cls) is type(nnx.Module):
            raise
        raise UserError(
            f"jshard derives a class from {cls.__name__}, which its metaclass "
            f"{type(cls).__name__} refuses: {type(error).__name__}: {error}"
        ) from error


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

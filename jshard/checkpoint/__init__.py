"""Checkpoints: saved whole or not at all, restored on any mesh."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jshard.checkpoint.checkpointer import Checkpointer, Save
else:

    def __getattr__(name: str) -> Any:
        """Imports Orbax, which takes long, once it is used."""
        if name in __all__:
            from jshard.checkpoint import checkpointer

            return getattr(checkpointer, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Checkpointer", "Save"]

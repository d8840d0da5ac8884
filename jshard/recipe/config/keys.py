"""Keys of a recipe's config that declare their meaning and range."""

from pathlib import Path
from typing import Any

from ml_collections import FieldReference

from jshard.system.cli.knob import Knob


class Key(FieldReference):
    """A value of a `ConfigDict` that declares its meaning and its possible values.

        "width": Key(128, "width of the residual stream", at_least=1)

    It is read and set like a plain value, which is checked for its type alone.

    Args:
      default: The value.
      help: What the key means, on one line, for `--help`.
      limits: Possible values: `kind`, `also`, `choices`, `at_least`, `above`,
        `at_most`, `below` and `hub` of a `jshard.system.cli.knob.Knob`.
    """

    def __init__(self, default: Any, help: str, **limits: Any):
        self.knob = Knob(default, help, **limits)
        plain = str if self.knob.kind is Path else self.knob.kind
        super().__init__(default, field_type=object if self.knob.also else plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or pickled key."""
        self.__dict__.update(state)

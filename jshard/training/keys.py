"""A key of a recipe's config: its default, its type, its range, and what it means."""

from pathlib import Path
from typing import Any

from ml_collections import FieldReference

from jshard.knob import Knob


class Key(FieldReference):
    """A value of a `ConfigDict` that also says what it means and what it may be.

    In a recipe's `get_config` it stands in the place of a plain value:

        "width": Key(128, "width of the residual stream", at_least=1)

    and is read and set like one: `config.model.width`. A plain value needs none of
    this; its type is then its only bound.

    Args:
      default: The value.
      help: What it means, on one line, for `--help`.
      limits: What it may be: `kind`, `also`, `choices`, `at_least`, `above`, `at_most`
        and `below` of a `jshard.knob.Knob`.
    """

    def __init__(self, default: Any, help: str, **limits: Any):
        self.knob = Knob(default, help, **limits)
        plain = str if self.knob.kind is Path else self.knob.kind
        super().__init__(default, field_type=object if self.knob.also else plain)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of what was pickled."""
        self.__dict__.update(state)

"""What to train: a Python file, its config, its parameters.

These names are what recipes and scripts that read them import, on first use: parents of
workers import ``recipe_path`` and need no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jshard.recipe.config.keys import Key as Key
    from jshard.recipe.config.run_config import complete as complete
    from jshard.recipe.configured import configure as configure
    from jshard.recipe.load import find_recipe as find_recipe
    from jshard.recipe.load import open_recipe as open_recipe
else:
    _HOMES = {
        "Key": "config.keys",
        "complete": "config.run_config",
        "configure": "configured",
        "find_recipe": "load",
        "open_recipe": "load",
    }
    __all__ = [*_HOMES]

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        return globals().setdefault(name, getattr(home, name))

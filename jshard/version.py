"""The version of jshard, also where it runs from a checkout and is not installed."""

import importlib.metadata
import platform

__version__ = "0.1.0.dev0"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")


def versions() -> dict[str, str]:
    """The versions of Python, of jshard and of the packages that it trains with."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "jshard": __version__, **found}

"""The version of jshard, also where it runs from a checkout and is not installed."""

import importlib.metadata
import platform
from collections.abc import Iterable

__version__ = "0.1.0.dev0"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """The versions of Python, of jshard, and of those packages that are installed."""
    found = {"python": platform.python_version(), "jshard": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

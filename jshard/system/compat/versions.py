"""The version of jshard, available in a checkout that is not installed, too."""

import importlib.metadata
import platform
from collections.abc import Iterable

__version__ = "0.1.0.dev0"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint")


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Returns the versions of Python, jshard, and the packages that are installed."""
    found = {"python": platform.python_version(), "jshard": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

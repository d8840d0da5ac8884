"""What a command sets up before JAX creates its devices."""

import importlib.util
import math
import os
import sys
import tempfile
from pathlib import Path

import jax

from jshard.system.cli.machine.address_space import check_address_space
from jshard.system.compat.compilations import has_flags
from jshard.system.compat.plugin_log import FAILED
from jshard.system.errors import UserError, warn

SUMS_IN_SWITCH = "NCCL_NVLS_ENABLE"
TIMEOUT = "xla_gpu_nccl_termination_timeout_seconds"
_XLA_CACHES = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
_AUTOTUNED = "xla_gpu_per_fusion_autotune_cache_dir"
_MODE = "xla_gpu_experimental_autotune_cache_mode"
COMPILED = "compiled"  # programs in the folder of a run on several hosts
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def has_accelerator() -> bool:
    """Returns whether this machine seems to have a GPU or a TPU."""
    devices = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
    return any(next(Path("/dev").glob(name), None) for name in devices)


def has_cuda_plugin() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    return any(map(importlib.util.find_spec, _PLUGINS))


def choose_platform() -> str:
    """Selects the CPU on machines without an accelerator.

    Otherwise JAX prints a traceback if the CUDA plugin is installed.

    Returns:
      What to tell the user where a GPU was expected, as in a container that was started
      without them; empty if none was.

    Raises:
      UserError: This process may not have the memory that JAX takes.
    """
    check_address_space()
    unset = not os.environ.get("JAX_PLATFORMS")
    if sys.platform == "linux" and unset and not has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes
        jax.config.update("jax_platforms", "cpu")
        if has_cuda_plugin():
            return (
                f"note: {FAILED} (no GPU is visible, not even as /dev/nvidia0): "
                "computing on the CPU"
            )
    return ""


def use_cpu() -> None:
    """Leaves the GPUs to the run whose checkpoint a command reads.

    Raises:
      UserError: This process may not have the memory that JAX takes.
    """
    check_address_space()
    jax.config.update("jax_platforms", "cpu")
    start_devices()


def start_devices() -> None:
    """Creates JAX's devices.

    Raises:
      UserError: there are none of those that JAX_PLATFORMS names.
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # without a plugin it only asserts
        if not (platforms := os.environ.get("JAX_PLATFORMS")):
            raise
        said = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device{said}; unset it to "
            "compute on what this machine has"
        ) from error


def make_cpu_devices(count: int) -> None:
    """Makes virtual CPU devices, unless the environment sets their number.

    Raises:
      UserError: JAX has created its devices already.
    """
    # Collectives between processes; a single process does not use them.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    flags = os.environ.get("XLA_FLAGS", "")
    if (
        "JAX_NUM_CPU_DEVICES" in os.environ
        or "xla_force_host_platform_device_count" in flags
    ):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            "the recipe computes with JAX while it is imported, before the devices "
            "are set up: move that into its functions"
        ) from error


def limit_collectives(stuck: float | None) -> None:
    """Lets XLA end this process when a collective on GPUs is stuck.

    By itself it waits for ever. It reads the limit from the environment, once. It is
    for hangs within a process, and for a supervisor that hangs itself, so it comes long
    after `watch.stuck`.

    Args:
      stuck: `watch.stuck` in seconds; None learns it, 0 waits for ever.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if stuck == 0 or TIMEOUT in flags or os.environ.get("JAX_PLATFORMS") == "cpu":
        return
    seconds = max(600, math.ceil(2 * (stuck or 0)))
    os.environ["XLA_FLAGS"] = f"{flags} --{TIMEOUT}={seconds}".strip()


def add_in_order() -> None:
    """Keeps NCCL from sums whose order is not known, unless the environment says so."""
    os.environ.setdefault(SUMS_IN_SWITCH, "0")


def cache_compilations(run: Path | None = None, *, writes: bool = True) -> None:
    """Turns on JAX's persistent compilation cache, if its folder can be written.

    The folder must be this user's own, as what is in it runs.

    Process 0 alone writes there, so a job of several hosts needs one that all of them
    see: otherwise all but the first compile again at each start.

    Args:
      run: The folder of a run on several hosts, which keeps its programs itself; None
        keeps them in the user's cache.
      writes: Whether this process writes XLA's timings; of a host's, one does.
    """
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    folder = Path(given or (run / COMPILED if run else "~/.cache/jshard/xla"))
    try:
        if "://" not in given:  # JAX itself writes to buckets
            folder = folder.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError("it belongs to another user, and programs run")
            tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        warn(
            f"compiled programs are not cached: cannot use {folder} ({error}); "
            "set JAX_COMPILATION_CACHE_DIR to a folder that can be written"
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", given or str(folder))
    if "://" in given:
        _autotune_locally(writes)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _autotune_locally(writes: bool) -> None:
    """Keeps XLA's timings of kernels on this host's disk, beside a cache in a bucket.

    JAX would give XLA a folder of the bucket, which XLA cannot write to. What the user
    set of this stays. XLA reads its flags once, before the devices are made.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_CACHES in os.environ or _AUTOTUNED in flags:
        return
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not has_flags(_AUTOTUNED, _MODE):
        return
    folder = Path("~/.cache/jshard/autotuned").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        warn(f"XLA's timings of kernels are not kept: cannot use {folder} ({error})")
        return
    # Processes of a host that all write there delete each other's files.
    mode = f"AUTOTUNE_CACHE_MODE_{'UPDATE' if writes else 'READ'}"
    flags += f" --{_AUTOTUNED}={folder} --{_MODE}={mode}"
    os.environ["XLA_FLAGS"] = flags.strip()

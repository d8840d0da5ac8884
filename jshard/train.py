"""Trains a recipe: `python -m jshard.train --config=gpt.py`.

Exit codes:
  0: The run is done.
  1: The run failed: a loss that is not finite, a full disk, or a bug.
  2: Bad input; one line says what to do.
  75: A signal ended the run and its state is saved: the same command goes on.
  130, 143: Ctrl-C, or SIGTERM, ended the process where nothing could be saved.
"""

import os
import sys
import tempfile
import time
import warnings
from datetime import datetime
from pathlib import Path

import jax

from jshard.command import run_command
from jshard.errors import UserError
from jshard.training.command_line import help_text, override, parse_arguments
from jshard.training.config import check, complete
from jshard.training.recipe import find_recipe, open_recipe

_IMPORTED = time.time()


def main() -> None:
    """Runs the command line; exits as the module says."""
    run_command(_train)


def _train(argv: list[str]) -> None:
    arguments = parse_arguments(argv)
    if arguments.recipe is None:
        if not arguments.help:
            raise UserError("which recipe? for example --config=gpt.py; see --help")
        print(help_text(), end="")
        return
    file = find_recipe(arguments.recipe)
    _choose_platform()
    with open_recipe(file) as recipe:
        config = complete(recipe.get_config(), file.name)
        if arguments.help:
            print(help_text(config, file.name), end="")
            return
        override(config, arguments.overrides, file.name)
        check(config)
        _make_cpu_devices(config.mesh.cpu_devices)
        _cache_compilations()
        # Only now: it imports much, and the mistakes above are told at once.
        from jshard.training.loop import run

        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        workdir = Path(arguments.workdir or f"runs/{recipe.name}-{stamp}")
        run(recipe, config, workdir, started=_process_start())


def _choose_platform() -> None:
    """Takes the CPU where there is nothing else.

    With the CUDA plugin installed and no GPU, JAX prints a traceback otherwise.
    """
    accelerators = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
    found = any(next(Path("/dev").glob(name), None) for name in accelerators)
    if sys.platform == "linux" and not found and not os.environ.get("JAX_PLATFORMS"):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes
        jax.config.update("jax_platforms", "cpu")


def _make_cpu_devices(count: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if (
        "JAX_NUM_CPU_DEVICES" in os.environ
        or "xla_force_host_platform_device_count" in flags
    ):
        return  # the user's own number
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UserError(
            "the recipe computes with JAX while it is imported, before the devices "
            "are set up: move that into its functions"
        ) from error


def _cache_compilations() -> None:
    """Turns on JAX's persistent compilation cache, where it can be written."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    folder = Path(given or "~/.cache/jshard/xla")
    try:
        if "://" not in given:  # else a bucket, which JAX writes itself
            folder = folder.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        warnings.warn(
            f"compiled programs are not kept: cannot write {folder} ({error}); "
            "set JAX_COMPILATION_CACHE_DIR to a folder that can be written",
            stacklevel=1,
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return
    jax.config.update("jax_compilation_cache_dir", given or str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _process_start() -> float:
    """Returns when this process started, as `time.time()`."""
    try:
        # The 22nd field, counted after the name, which may hold spaces: ticks since
        # the machine started.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return _IMPORTED
    return time.time() - age


if __name__ == "__main__":
    main()

"""Shortens what JAX's CUDA plugin prints about absent GPUs to one line.

The first messages come from C++ while JAX is imported, so ``jshard`` imports this
module first, and this module imports JAX for jshard's commands, but for those that may
do without (``_LATER``). Only jshard's commands filter: a program that imports
``jshard`` keeps its standard error as it is.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jshard.system.cli.commands import COMMANDS
from jshard.system.cli.machine.address_space import check_address_space
from jshard.system.cli.terminal import show
from jshard.system.compat.plugin_log import LOGGER, in_one_line
from jshard.system.errors import UserError

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Commands that may only list or start others.
_LATER = ("", "launch", "train")
# Drops lines of C++ that no setting turns off: information (I0000), the note that log
# messages come early, and that a step does not fit, which the planner reports itself.
_FILTER = r"""
import re, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when its input does
remark = re.compile(
    rb"I\d{4} .*\]|WARNING: All log messages before absl::Init"
    rb"|W\d{4} .* hlo_rematerialization.cc:\d+\] Can't reduce memory use"
)
for line in sys.stdin.buffer:
    if not remark.match(line):
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
"""


def has_accelerator() -> bool:
    """Returns whether this machine seems to have a GPU or a TPU."""
    devices = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
    return any(next(Path("/dev").glob(name), None) for name in devices)


def has_cuda_plugin() -> bool:
    """Returns whether JAX's CUDA plugin is installed."""
    return any(map(importlib.util.find_spec, _PLUGINS))


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Hides XLA's informational lines from standard error within it.

    Only if the plugin is installed and there is no GPU. The filter is another process,
    so that what XLA prints before it aborts is not lost.
    """
    if not has_cuda_plugin() or has_accelerator():
        yield
        return
    before = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=before) as process:
        assert process.stdin is not None
        os.dup2(process.stdin.fileno(), 2)
        process.stdin.close()
        try:
            yield
        finally:
            if sys.stderr is not None:
                sys.stderr.flush()
            os.dup2(before, 2)  # ends the filter's input; `with` waits for its end
            os.close(before)


def start_devices() -> None:
    """Creates JAX's devices, without the remarks of a CUDA plugin on absent GPUs.

    Raises:
      UserError: there are none of those that JAX_PLATFORMS names.
    """
    try:
        with without_remarks():
            importlib.import_module("jax").devices()
    except (AssertionError, RuntimeError) as error:  # without a plugin it only asserts
        if not (platforms := os.environ.get("JAX_PLATFORMS")):
            raise
        said = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device{said}; unset it to "
            "compute on what this machine has"
        ) from error


def import_jax() -> None:
    """Imports JAX, without the remarks of a CUDA plugin on absent GPUs.

    Raises:
      UserError: This process may not have the memory that it takes.
    """
    if "jax" not in sys.modules:
        check_address_space()
        with without_remarks():
            importlib.import_module("jax")


def command_of(argv: Sequence[str], orig_argv: Sequence[str]) -> str | None:
    """Returns which of jshard's commands a process runs; "" for the list of them.

    By ``sys.argv`` while ``jshard`` is imported, and ``sys.orig_argv``, which includes
    Python's own options.
    """
    if argv[:1] == ["-m"]:  # until Python has found the module to run
        module = orig_argv[orig_argv.index("-m") + 1] if "-m" in orig_argv else ""
        package, _, command = module.partition(".")
        return command if package == "jshard" else None
    script = Path(argv[0]).name if argv else ""
    return next((name for name in COMMANDS if script == f"jshard-{name}"), None)


if (_COMMAND := command_of(sys.argv, sys.orig_argv)) is not None:
    logging.getLogger(LOGGER).addFilter(in_one_line)
    if _COMMAND not in _LATER:
        try:
            import_jax()
        except UserError as error:
            show(f"jshard: error: {error}", error=True)
            sys.exit(2)

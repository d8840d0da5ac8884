"""Keeps remarks on absent GPUs from the terminal: those of JAX's CUDA plugin.

The first of them, lines of C++, come when JAX is imported. Commands filter those, so
``jshard`` begins with this module. A program that only imports ``jshard`` keeps its
standard error as it is: what JAX's import says there is between it and JAX.
"""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jshard.cli.commands import COMMANDS
from jshard.compat.plugin_log import LOGGER, is_about_absent_gpu

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_SCRIPTS = tuple(f"jshard-{name}" for name in COMMANDS)
# Lines of C++ that no setting keeps away: information (I0000), the note that such lines
# come early, and that a step does not fit, which a plan says. Others pass.
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
    """Whether this machine seems to have a GPU or a TPU."""
    devices = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")
    return any(next(Path("/dev").glob(name), None) for name in devices)


@contextlib.contextmanager
def without_remarks() -> Iterator[None]:
    """Within it, standard error loses XLA's lines of information.

    Only where there is the plugin and no GPU. Another process filters, so that what
    XLA says before it aborts is not lost.
    """
    if not any(map(importlib.util.find_spec, _PLUGINS)) or has_accelerator():
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
            os.dup2(before, 2)  # the filter reads to the end, and is waited for
            os.close(before)


def is_command(argv: Sequence[str], orig_argv: Sequence[str]) -> bool:
    """Whether a process runs one of jshard's commands, not a program that imports it.

    Args:
      argv: as ``sys.argv`` is while ``jshard`` is imported.
      orig_argv: ``sys.orig_argv``, with Python's own options.
    """
    if argv[:1] == ["-m"]:  # until Python has found the module that it is to run
        module = orig_argv[orig_argv.index("-m") + 1] if "-m" in orig_argv else ""
        return module.partition(".")[0] == "jshard"
    return bool(argv) and Path(argv[0]).name in _SCRIPTS


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a message of JAX's is more than that its CUDA plugin finds no GPU."""
    return not is_about_absent_gpu(record) or has_accelerator()


logging.getLogger(LOGGER).addFilter(_is_news)
if "jax" not in sys.modules and is_command(sys.argv, sys.orig_argv):
    with without_remarks():
        importlib.import_module("jax")

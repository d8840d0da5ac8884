"""Keeps remarks on absent GPUs from the terminal: those of JAX's CUDA plugin.

The first of them comes when JAX is imported, so ``jshard`` begins with this module.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
# Lines of C++ that no setting keeps away: information (I0000), and the note that such
# lines come early. Warnings and errors pass.
_FILTER = r"""
import re, sys
remark = re.compile(rb"I\d{4} .*\]|WARNING: All log messages before absl::Init")
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


if "jax" not in sys.modules:
    with without_remarks():
        importlib.import_module("jax")

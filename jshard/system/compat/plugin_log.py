"""Shortens JAX's log record of a CUDA plugin that fails.

This module must not import JAX, because it is used before JAX is imported.
"""

import logging

# The logger of the JAX module that initializes the plugins.
LOGGER = "jax._src.xla_bridge"
FAILED = "a CUDA plugin is installed but cannot be used"


def note_of(record: logging.LogRecord) -> str | None:
    """Returns one line, with the reason, of a record that the CUDA plugin failed.

    None of other records. If the plugin is installed on a machine without a usable GPU,
    every start logs such a record with a traceback. Tested with JAX 0.10.2, 0.11.2 and
    0.12.0.1. If it breaks, users see the traceback.
    """
    failed = "Jax plugin configuration error" in str(record.msg)
    if not (failed and "xla_cuda" in str(record.args) and record.exc_info):
        return None
    why = " ".join(str(record.exc_info[1]).split())
    return f"note: {FAILED} ({why}): computing on the CPU"

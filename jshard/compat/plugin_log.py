"""What JAX logs of a CUDA plugin that finds no GPU. Imports no JAX: it comes first."""

import logging

# Of the module that starts the plugins.
LOGGER = "jax._src.xla_bridge"


def is_about_absent_gpu(record: logging.LogRecord) -> bool:
    """Whether a record of ``LOGGER`` says that the CUDA plugin could not start.

    With the plugin installed and no GPU that is a traceback at every start. Tried on
    JAX 0.10.2, 0.11.2 and 0.12.0.1; when it breaks, users see the traceback.
    """
    failed = "Jax plugin configuration error" in str(record.msg)
    return failed and "xla_cuda" in str(record.args)

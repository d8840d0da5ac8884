"""Planning for GPUs that are not there: steps compiled, not run.

Needs the CUDA plugin of the installed JAX, no GPU: ``pip install 'jshard[plan]'``. The
core never imports this package.
"""

from jshard.plan.ahead_of_time import compile_for
from jshard.plan.topology import GPU, GPUS, devices, has_plugin
from jshard.plan.without_gpu import tracing_for

__all__ = ["GPU", "GPUS", "compile_for", "devices", "has_plugin", "tracing_for"]

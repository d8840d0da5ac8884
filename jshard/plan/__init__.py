"""Planning for GPUs that are not there: steps compiled, not run.

Needs the CUDA plugin of the installed JAX, no GPU: ``pip install 'jshard[plan]'``. The
core never imports this package.
"""

from jshard.plan.topology import GPU, GPUS, devices

__all__ = ["GPU", "GPUS", "devices"]

"""Planning for GPUs that are not there: steps compiled, not run.

Needs the CUDA plugin of the installed JAX, no GPU: ``pip install 'jshard[plan]'``. The
core never imports this package.

A plan is made in one direction, and imports go the other way:

- ``topology``, ``constants``, ``program``: a recipe's step, traced for a GPU known
  by its figures; ``ahead_of_time`` compiles it;
- ``hlo``: the compiled program's text, read;
- ``cost``: what its instructions cost, when each runs, what they send;
- ``memory``: XLA's buffers at the fullest moment, by part;
- ``planning``: all of these as a ``Plan``;
- ``search``: many programs, estimated, compiled in processes, compared;
- ``output``: text, JSON, a trace, a page; and ``command_line``.
"""

from jshard.plan.ahead_of_time import compile_for
from jshard.plan.topology import GPU, GPUS, devices, has_plugin
from jshard.plan.without_gpu import tracing_for

__all__ = ["GPU", "GPUS", "compile_for", "devices", "has_plugin", "tracing_for"]

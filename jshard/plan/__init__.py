"""Compiles steps for GPUs that this machine does not have, without running them.

Needs the CUDA plugin of the installed JAX, but no GPU: ``pip install 'jshard[plan]'``.
``describe``, the start-up note of any step, needs nothing. The core never imports this
package.

Data flows through its modules in this order, and imports go the other way:

- ``topology``, ``program``: traces and compiles a recipe's step for a GPU known by its
  figures (``jshard.plan.fit.hardware``);
- ``hlo``: parses the compiled program's text;
- ``cost``: the cost of its instructions, when each runs, and what they send;
- ``memory``: XLA's buffers at the peak, by part;
- ``planning``: combines these in a ``Plan``;
- ``any_program``: plans of functions and files that are no recipe's (``plan``);
- ``step_contract``: what a test holds a plan or any compiled step to;
- ``trace``: what a profile shows beside the plan (``compare``);
- ``search``: estimates, compiles and compares many programs;
- ``output``: text, JSON, a trace, a page; and ``__main__``, the command.
"""

from jshard.plan.any_program import plan, plan_file
from jshard.plan.fit.hardware import GPU, GPUS
from jshard.plan.start_up import describe
from jshard.plan.topology import compile_for, devices, has_plugin, tracing_for
from jshard.plan.trace.comparison import compare

__all__ = [
    "GPU",
    "GPUS",
    "compare",
    "compile_for",
    "describe",
    "devices",
    "has_plugin",
    "plan",
    "plan_file",
    "tracing_for",
]

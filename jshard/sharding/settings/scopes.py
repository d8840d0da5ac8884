"""Names of a step's parts, and values that hold while a part of it is traced.

The names are scopes of operations, and phases of the plan. XLA keeps scopes as
metadata, which profilers show: ``jvp(layers)/all-gather`` in the forward,
``transpose(jvp(layers))/all-gather`` in the backward. They change nothing in the
compiled program.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

LAYERS = "layers"
UPDATE = "update"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
LOOK_UP = "look-up"
EXCHANGE = "exchange of heads"
TENSOR_PARALLEL = "tensor-parallel"
BESIDE_TOKENS = "beside tokens"  # in it: of what is named beside them
EXCHANGE_TOKENS = "exchange of tokens"
COUNTED = "of counted examples"  # in it: means that leave out what fills up devices
# What exceeds the first round, and from which multiple of an even share, in which
# steps: "further rounds from 1.25 by 0.5". Only plans with --imbalance count it.
FURTHER_ROUNDS = "further rounds"
# The switch of a pipeline: micro-batches, stages of a device, ticks of its loop.
SCHEDULE = "{} micro-batches of {} stages in {} ticks"
# Its conditionals of what one stage alone does, before and after the layers.
FIRST_STAGE, LAST_STAGE = "first stage", "last stage"
STAGES = "stages"  # what moves parameters and gradients between rest and stages
# Products of weights and activations in one byte (``Precision.products``).
FLOAT8 = "float8"

Value = TypeVar("Value")


@contextlib.contextmanager
def within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a variable for what is traced inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)

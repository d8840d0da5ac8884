"""Names of a step's parts: scopes of its operations, and phases of the plan.

XLA keeps the scopes as metadata, which profilers show: ``jvp(layers)/all-gather`` in
the forward, ``transpose(jvp(layers))/all-gather`` in the backward. They change nothing
in the compiled program.
"""

LAYERS = "layers"
UPDATE = "update"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
LOOK_UP = "look-up"
EXCHANGE = "exchange of heads"
TENSOR_PARALLEL = "tensor-parallel"
EXCHANGE_TOKENS = "exchange of tokens"
# What exceeds the first round; no plan and no start-up note counts it.
FURTHER_ROUNDS = "further rounds"

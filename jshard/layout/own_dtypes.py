"""The dtypes that a model's author gave its modules, for their parameters."""

from typing import Any

from flax import nnx

from jshard.fsdp.policy import Policy
from jshard.fsdp.precision import own_dtype
from jshard.fsdp.state import TrainState
from jshard.layout.variables import variables


def own_dtypes(state: TrainState, policy: Policy) -> dict[tuple, Any]:
    """Returns the dtypes of modules that have one of their own, by parameter.

    Args:
      state: concrete, abstract or traced.
      policy: only one that sets the dtype of the computation asks for them.
    """
    precisions = policy.everywhere("precision").values()
    if all(precision.compute is None for precision in precisions):
        return {}
    model = nnx.merge(state.graphdef, *state.model_arrays, copy=True)
    modules = {path: own_dtype(module) for path, module in nnx.iter_modules(model)}

    def innermost(path: tuple) -> Any:
        above = (path[:n] for n in reversed(range(len(path))))
        return next((modules[module] for module in above if module in modules), None)

    found = {path: innermost(path) for path, _ in variables(model)}
    return {path: dtype for path, dtype in found.items() if dtype is not None}

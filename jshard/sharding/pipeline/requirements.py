"""What a pipeline needs of a policy and a model."""

from typing import Any

from jshard.sharding.pipeline.schedule import bubble, check_micro_batches
from jshard.sharding.pipeline.stages import divide
from jshard.sharding.settings.mesh import stages_of
from jshard.sharding.settings.policy import Offload, Policy
from jshard.sharding.settings.precision import is_quantized
from jshard.sharding.settings.state import ModelArrays
from jshard.system.errors import UserError, warn

BUSY = 2 / 3  # a pipeline whose stages are busy for less of a step is a warning


def check_pipeline(arrays: ModelArrays, policy: Policy, mesh: Any) -> None:
    """Raises UserError for what pipelines do not do, and warns of a large bubble."""
    if (number := stages_of(mesh)) == 1:
        if policy.stages_per_device > 1:
            raise UserError(
                f"policy.stages_per_device={policy.stages_per_device}: the mesh has no "
                "pipeline; add mesh.pipe, or leave it at 1"
            )
        return
    stages = divide(arrays, mesh, policy)
    check_micro_batches(number, policy.accumulate, policy.stages_per_device)
    own = policy.unit(stages.path)
    precisions = policy.everywhere("precision").values()
    refused = {
        f"reshard_after_forward={own.reshard_after_forward}": (
            not isinstance(own.reshard_after_forward, bool),
            "a device gathers its weights for each micro-batch (True), or once per "
            "step and keeps them (False)",
        ),
        f"first_k={own.first_k}": (
            own.first_k is not None,
            "all layers of a pipeline have the same remat policy",
        ),
        f"reshard_root={policy.reshard_root}": (
            policy.reshard_root is not False,
            "what is outside of the Stack runs in two stages and is not a unit",
        ),
        f"offload={policy.offload!r}": (
            policy.offload == "all",
            "parameters move to their stages in device memory; use 'optimizer'",
        ),
        "remat": (
            isinstance(own.remat, Offload),
            "activations of a pipeline stay in device memory",
        ),
        "precision.products": (
            bool(policy.products()),
            "a scale is that of all layers, which are in several stages",
        ),
        "precision.gather": (
            any(is_quantized(precision.gather) for precision in precisions),
            "quantized gathers are not counted in a pipeline; use bfloat16",
        ),
    }
    for name, (wrong, why) in refused.items():
        if wrong:
            raise UserError(f"mesh: pipe={number}: policy.{name}: {why}")
    idle = bubble(number, policy.accumulate, policy.stages_per_device)
    if 1 - idle < BUSY:
        least = -(-2 * (number - 1) // policy.stages_per_device)
        warn(
            f"mesh: pipe={number}: with policy.accumulate={policy.accumulate} a device "
            f"is idle for {idle:.0%} of a step (the bubble); with {least}, for 33%"
        )

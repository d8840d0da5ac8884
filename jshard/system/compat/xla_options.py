"""XLA compiler options for steps on GPUs, and the reason for each.

The options are passed to the step's own ``jit``, so no environment variables need to be
set. Their names and types differ between JAX versions, and these differences are
handled here. Tested with JAX 0.10.2, 0.11.2 and 0.12.0.1. If a name or type changes,
compiling a step for GPUs fails with XLA's own message. The measurements are in
docs/log/schedules.md.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jshard.system.errors import UserError

# In bytes. This is high enough that each unit's parameters take one collective, which
# is one launch and one line in a profile.
_ONE_COLLECTIVE = 1 << 36

# Whether XLA starts a gather only after the residuals of the running layer are copied
# into their stacks, unless the copies wait for it. Before 0.11 it starts early by
# itself, and hides more with one collective in flight.
GATHERS_LATE = jax.__version_info__ >= (0, 11)
# Whether XLA:CPU obeys barriers. Before 0.11 it merges a backward's gathers with the
# forward's, and keeps full gradients for scatters at the end.
BARRIERS_HOLD_ON_CPUS = jax.__version_info__ >= (0, 11)

# The value and reason of each option, by XLA's name.
OPTIONS: dict[str, tuple[bool | int | str, str]] = {
    "xla_gpu_enable_latency_hiding_scheduler": (
        True,
        "schedules collectives beside computation",
    ),
    "xla_gpu_enable_while_loop_double_buffering": (
        True,
        "unrolls the loops over layers by two, so that weights gathered a layer ahead "
        "land where they are used instead of being copied there",
    ),
    "xla_gpu_experimental_parallel_collective_overlap_limit": (
        2,
        "lets a gather and a scatter of neighbouring layers be in flight together, "
        "where links between hosts make both long; elsewhere it takes memory, and XLA "
        "issues the last ones later",
    ),
    "xla_gpu_all_gather_combine_threshold_bytes": (
        _ONE_COLLECTIVE,
        "gathers all weights of a layer in one collective",
    ),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": (
        _ONE_COLLECTIVE,
        "scatters all gradients of a layer in one collective",
    ),
    "xla_gpu_all_reduce_combine_threshold_bytes": (
        _ONE_COLLECTIVE,
        "sums all small gradients in one collective",
    ),
    "xla_gpu_enable_triton_gemm": (
        False,
        "leaves matrix products to cuBLAS: fewer passes over memory around them, no "
        "kernels to tune, and the program that was planned is the one that runs",
    ),
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
        "keeps collectives out of CUDA graphs, where some have hung",
    ),
    "xla_gpu_memory_limit_slop_factor": (
        1000,
        "keeps XLA from recomputing what the policy saves, and from overlapping less, "
        "when a step fills nine tenths of memory; neither is worth its cost",
    ),
}
# For small programs that run a few times: a third of the time to compile on CPUs.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # there is no other since
    QUICK["xla_cpu_use_fusion_emitters"] = False
# For steps with float8 products.
FLOAT8_OPTIONS: dict[str, tuple[bool | int | str, str]] = {
    "xla_gpu_dot_merger_threshold_mb": (
        0,
        "keeps small products with a common operand apart: XLA would concatenate their "
        "weights, which have a scale each, and multiply in bfloat16",
    ),
}
# For the same bits each time, which cost some speed (docs/how_to/trust.md).
DETERMINISTIC: dict[str, tuple[bool | int | str, str]] = {
    "xla_gpu_deterministic_ops": (
        True,
        "adds up in one order: scatters are sorted first, cuDNN's backward of "
        "attention and its convolutions take their deterministic algorithms, and no "
        "kernel is chosen by a measurement, which may choose another one next time",
    ),
}
# The fewest devices of a mesh for which an option is passed.
LARGE_MESHES = {
    "xla_gpu_experimental_parallel_collective_overlap_limit": 16
    if GATHERS_LATE
    else 128
}


def compiler_options(
    platform: str,
    devices: int,
    changes: Mapping[str, Any] | None = None,
    *,
    float8: bool = False,
) -> dict[str, Any]:
    """Returns the compiler options for a step's ``jit``, values by name.

    There are defaults only for the ``platform`` "gpu", and for ``devices`` of a mesh.
    ``changes`` are the user's; None among them leaves an option at XLA's default.
    """
    values: dict[str, Any] = {}
    if platform == "gpu":
        given = OPTIONS | (FLOAT8_OPTIONS if float8 else {})
        values = {
            name: value
            for name, (value, _) in given.items()
            if devices >= LARGE_MESHES.get(name, 1)
        }
    values |= changes or {}
    return {name: value for name, value in values.items() if value is not None}


def deterministic(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's options and those of ``DETERMINISTIC``.

    Raises:
      UserError: The user's turn one of them off.
    """
    for name, (value, _) in DETERMINISTIC.items():
        if changes.get(name, value) != value:
            raise UserError(
                f"deterministic=true sets {name}={value}, and compiler_options "
                f"{name}={changes[name]}: leave one of the two out"
            )
    return {**changes, **{name: value for name, (value, _) in DETERMINISTIC.items()}}


def is_deterministic(options: Mapping[str, Any]) -> bool:
    """Returns whether options have all of ``DETERMINISTIC``."""
    return all(options.get(name) == x for name, (x, _) in DETERMINISTIC.items())


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for a name or value that the installed XLA does not accept."""
    for name, value in options.items():
        try:
            jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
        except (jax.errors.JaxRuntimeError, TypeError) as error:
            raise UserError(
                f"compiler option {name}={value!r}: JAX {jax.__version__} says: "
                f"{str(error).splitlines()[0]}"
            ) from error

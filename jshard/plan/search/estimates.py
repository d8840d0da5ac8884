"""What is known of a candidate before it is compiled: a bound, and an estimate.

The bound is of memory, and below what any compiler can do: what must be there at the
same time, by dataflow. It rules candidates out. The estimate decides which of the
others are compiled, and in which order; nothing is ruled out by it.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from jshard.compat.jaxprs import CALLS, scan_body, scan_sizes
from jshard.layout.memory_kinds import HOST
from jshard.layout.specs import layer_dims
from jshard.mesh import FSDP
from jshard.plan.memory.memory import shard_bytes
from jshard.plan.memory.parts import PARAMS, REST
from jshard.plan.program import Program
from jshard.plan.topology import GPU, GPUS_A_HOST
from jshard.policy import Policy
from jshard.precision import Precision
from jshard.state import TrainState
from jshard.unit.dataflow import equation_dependencies


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model's sharded parameters, summed up.

    Attributes:
      elements: of all.
      stacked: of these, in Stacks.
      layer: of one layer of each Stack.
      trained: bytes of all that are trained, whole, replicated ones too.
      trained_shards: bytes of the shards of these.
    """

    elements: int
    stacked: int
    layer: int
    trained: int
    trained_shards: int


@dataclasses.dataclass(frozen=True)
class StateSize:
    """A state on one device: bytes there, and in host memory; its parameters."""

    device: int
    host: int
    weights: Weights


@dataclasses.dataclass(frozen=True)
class Activity:
    """What one trace tells of all candidates with its remat policy.

    Attributes:
      flops: of matrix products on a device, in one step.
      saved: bytes of activations on a device at the fullest moment, an example.
      hosted: likewise, in host memory.
    """

    flops: float
    saved: float
    hosted: float


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds a step, and bytes of device memory."""

    seconds: float
    memory: float


def state_size(state: TrainState) -> StateSize:
    """Measures an abstract state with shardings."""
    place = {False: 0, True: 0}
    for x in jax.tree.leaves(state):
        place[x.sharding.memory_kind == HOST] += shard_bytes(x)
    elements = stacked = layer = trained = shards = 0
    for params, moving in ((state.params, True), (state.frozen, False)):
        for _, variable in nnx.to_flat_state(params):
            x = variable.get_value()
            if moving:
                trained += x.size * x.dtype.itemsize
                shards += shard_bytes(x)
            if FSDP not in x.sharding.spec:
                continue
            elements += x.size
            if dims := layer_dims(variable):
                stacked += x.size
                layer += x.size // math.prod(x.shape[:dims])
    weights = Weights(elements, stacked, layer, trained, shards)
    return StateSize(place[False], place[True], weights)


def memory_bound(size: StateSize, policy: Policy) -> int:
    """Bytes of device memory below which no step with this policy can run.

    The state's own; where there are micro-batches, the gradients that add up meanwhile
    (of parameters that the loss reads); and with ``defer_scatter`` all weights, too,
    which lie outside the loop over them.
    """
    if policy.accumulate == 1:
        return size.device
    if not policy.defer_scatter:
        return size.device + size.weights.trained_shards
    whole = size.weights.elements * _narrow(policy)
    return size.device + size.weights.trained + whole


def _narrow(policy: Policy) -> int:
    """Bytes of an element of gathered weights, where they are narrowest."""
    precisions = [policy.precision]
    precisions += [
        f["precision"] for f in policy.overrides.values() if "precision" in f
    ]

    def narrowest(p: Precision) -> int:
        named = [x for x in (p.param, p.gather, p.compute) if x is not None]
        return min([jnp.dtype(x).itemsize for x in named], default=1)

    return min(map(narrowest, precisions))


def estimate(
    size: StateSize,
    policy: Policy,
    mesh: Mesh | AbstractMesh,
    gpu: GPU,
    activity: Activity,
    examples: int,
) -> Estimate:
    """A guess: the roofline of a step, and the parts of its memory added up.

    Args:
      size: of its state.
      policy: of the candidate.
      mesh: of the candidate.
      gpu: the card.
      activity: of its remat policy.
      examples: a device has in a step.
    """
    weights, micro = size.weights, policy.accumulate
    width = jnp.dtype(policy.precision.gather or jnp.float32).itemsize
    reshard = policy.reshard_after_forward
    # Weights in memory: two layers and their gradients, or what is kept; and the root.
    kept = weights.layer * 4
    if reshard is not True:
        kept += weights.stacked / (1 if reshard is False else reshard)
    kept += weights.elements - weights.stacked
    if policy.defer_scatter:
        kept = 0  # in the bound already
    bound = memory_bound(size, policy)
    gradients = weights.trained_shards if micro == 1 else 0
    if policy.defer_scatter:
        gradients = weights.trained  # of a micro-batch, beside their sum
    saved = activity.saved * examples / micro
    needed = bound + gradients + kept * width + saved

    shards = mesh.shape[FSDP]
    slow, fast = _speed(shards, gpu), _speed(min(shards, GPUS_A_HOST), gpu)
    rounds = 1 if policy.defer_scatter else micro
    away = (shards - 1) / shards
    wire = rounds * weights.elements * width * away / slow
    if not policy.defer_scatter and reshard is not False:
        again = slow if reshard is True or reshard > GPUS_A_HOST else fast
        wire += rounds * weights.stacked * width * away / again
    sums = jnp.dtype(policy.precision.reduce or jnp.float32).itemsize
    wire += rounds * weights.elements * sums * away / slow
    if (copies := mesh.size // shards) > 1:
        beside = max(GPUS_A_HOST // shards, 1)  # copies that share a host
        speed = _speed(copies, gpu, beside)
        wire += 2 * weights.trained_shards * (copies - 1) / copies / speed
    reached = gpu.constants
    busy = activity.flops / (reached.matmul * gpu.flops)
    # Of the shorter one some is never hidden: the ends of a step.
    seconds = max(busy, wire) + 0.1 * min(busy, wire)
    # Activations leave beside the forward; the optimizer's state comes and goes.
    seconds = max(seconds, 2 * activity.hosted * examples / reached.host_bus)
    seconds += 2 * size.device / (reached.memory * gpu.bandwidth)
    seconds += size.host / reached.host_bus
    return Estimate(seconds, needed)


def _speed(group: int, gpu: GPU, in_host: int = GPUS_A_HOST) -> float:
    """Bytes/s that a device of a group receives, of which ``in_host`` share a host."""
    inside = gpu.constants.link * gpu.nvlink
    ports = in_host * gpu.constants.network_port
    return inside if group <= in_host else min(inside, ports)


def activity(program: Program) -> Activity:
    """Measures a traced step, per example of a micro-batch on a device."""
    config, jaxpr = program.job.config, program.traced.jaxpr.jaxpr
    params = {
        id(x) for x in jax.tree.leaves((program.state.params, program.state.frozen))
    }
    bits = [PARAMS if id(x) in params else REST for x in jax.tree.leaves(program.state)]
    bits += [REST] * (len(jaxpr.invars) - len(bits))
    found = _activations(jaxpr, bits)
    examples = config.batch_size / program.mesh.size / config.policy.accumulate
    return Activity(
        _flops(jaxpr),
        (found["saved"] + found["layer"]) / examples,
        found["hosted"] / examples,
    )


def _activations(jaxpr: core.Jaxpr, bits: Sequence[int]) -> collections.Counter[str]:
    """Bytes that the forward's loops keep for the backward, and of a layer of it.

    Args:
      jaxpr: of a step, or of a part of it.
      bits: what its inputs depend on; what depends on parameters alone is a weight.

    Returns:
      What is "saved" on a device, and "hosted"; and the results of the products in the
      largest "layer", which the backward computes again (or chunk of the loss).
    """
    found: collections.Counter[str] = collections.Counter()
    env = dict(zip(jaxpr.invars, bits, strict=True))
    for eqn in jaxpr.eqns:
        entering = [
            0 if isinstance(x, core.Literal) else env.get(x, 0) for x in eqn.invars
        ]
        out = equation_dependencies(eqn, entering, by_value=True)
        env.update(zip(eqn.outvars, out, strict=True))
        stack, name = str(eqn.source_info.name_stack), eqn.primitive.name
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if name == "scan" and stack.startswith(("jvp", "transpose")):
            found["layer"] = max(found["layer"], _products(scan_body(eqn)))
            _, carry = scan_sizes(eqn)
            for var, bit in list(zip(eqn.outvars, out, strict=True))[carry:]:
                if bit & REST and stack.startswith("jvp"):
                    aval: Any = var.aval
                    hosted = aval.memory_space == jax.memory.Space.Host
                    found["hosted" if hosted else "saved"] += _nbytes(aval)
        elif inner and (name in CALLS or name in ("scan", "shard_map")):
            if name == "scan":  # what its carry depends on, too
                consts, carry = scan_sizes(eqn)
                for i in range(carry):
                    entering[consts + i] |= out[i]
            inside = _activations(inner, entering)
            layer = max(found.pop("layer", 0), inside.pop("layer", 0))
            found += inside + collections.Counter(layer=layer)
    return found


def _products(jaxpr: core.Jaxpr) -> int:
    """Bytes of the results of matrix products."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            total += _nbytes(eqn.outvars[0].aval)
        total += sum(map(_products, core.jaxprs_in_params(eqn.params)))
    return total


def _nbytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _flops(jaxpr: core.Jaxpr) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            operand: Any = eqn.invars[0].aval
            result: Any = eqn.outvars[0].aval
            depth = math.prod(operand.shape[d] for d in contracted)
            total += 2.0 * result.size * depth
        for inner in core.jaxprs_in_params(eqn.params):
            total += _flops(inner) * eqn.params.get("length", 1)
    return total

"""What is known of a candidate before it is compiled: a memory bound and an estimate.

The bound is below what any compiler can reach: the bytes that must be in memory at the
same time, by dataflow. It rules candidates out. The estimate only decides in which
order the others are compiled.
"""

import collections
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from jshard.plan.fit.hardware import GPU, overlapped
from jshard.plan.program import Program
from jshard.plan.search.candidates import Candidate
from jshard.plan.start_up import equations, product_flops
from jshard.sharding.layout.capacity import shard_bytes, state_bytes
from jshard.sharding.layout.specs import is_sharded, layer_dims
from jshard.sharding.pipeline.schedule import bubble
from jshard.sharding.settings.mesh import (
    CONTEXT,
    EXPERT,
    TENSOR,
    names_of,
    shards_of,
    stages_of,
)
from jshard.sharding.settings.policy import Policy
from jshard.sharding.settings.precision import PRODUCTS, Precision
from jshard.sharding.settings.state import TrainState
from jshard.system.compat.jaxprs import (
    CALLS,
    open_inner,
    scan_body,
    scan_sizes,
    scopes_of,
)


class StateSize(NamedTuple):
    """The size of a state on one device."""

    device: int  # bytes of device memory
    host: int  # bytes of host memory
    elements: int  # of all sharded parameters, not divided by the shards
    stacked: int  # those of Stacks
    layer: int  # those of one layer of each Stack
    trained: int  # bytes of all trained parameters, not divided by the shards
    trained_shards: int  # bytes of their shards


class Activity(NamedTuple):
    """What one trace reveals about all candidates with its remat policy.

    All is per example of a device.
    """

    flops: float  # of the matrix products in a step
    saved: float  # bytes of activations on a device at the peak
    hosted: float  # the same in host memory


class Estimate(NamedTuple):
    """Seconds of a step, and bytes of device memory."""

    seconds: float
    memory: float


def state_size(state: TrainState, offload: str | None = None) -> StateSize:
    """Measures an abstract state with shardings, as if ``Policy.offload`` were this."""
    elements = stacked = layer = 0
    for _, variable in state.flat_params():
        x = variable.get_value()
        if is_sharded(x.sharding.spec):
            # Of what further axes split, a device gathers its part.
            size = x.size // _parts(x.sharding)
            elements += size
            if dims := layer_dims(variable):
                stacked += size
                layer += size // math.prod(x.shape[:dims])
    trained = jax.tree.leaves(state.params)
    streamed = (state.opt_state, state.ema) if offload is not None else ()
    fetched = (state.params, state.frozen) if offload == "all" else ()
    moved = sum(
        shard_bytes(x)
        for x in jax.tree.leaves((streamed, fetched))
        if is_sharded(x.sharding.spec)
    )
    return StateSize(
        state_bytes(state) - moved,
        state_bytes(state, on_host=True) + moved,
        elements,
        stacked,
        layer,
        sum(map(_nbytes, trained)),
        sum(map(shard_bytes, trained)),
    )


def of_stage(size: StateSize, stages: int) -> StateSize:
    """Returns what a device of a pipeline has of it: a part of the Stack's layers."""
    stacked = size.stacked // stages
    elements = size.elements - size.stacked + stacked
    trained = size.trained * elements // max(size.elements, 1)
    return size._replace(elements=elements, stacked=stacked, trained=trained)


def _parts(sharding: Any) -> int:
    """Returns in how many parts "tensor" and "expert" split a sharded parameter.

    They lead a dimension's axes there; all that only shard a parameter follow "fsdp".
    """
    firsts = [names_of(axes)[0] for axes in sharding.spec if axes]
    return math.prod(sharding.mesh.shape[a] for a in firsts if a in (TENSOR, EXPERT))


def memory_bound(size: StateSize, policy: Policy) -> int:
    """Returns bytes of device memory below which no step with this policy can run.

    These are the state; with micro-batches, the accumulated gradients (of parameters
    that the loss reads); with ``defer_scatter``, full gradients and all gathered
    weights, which outlive the loop over micro-batches.
    """
    if policy.accumulate == 1:
        return size.device
    if not policy.defer_scatter:
        return size.device + size.trained_shards
    return size.device + size.trained + int(size.elements * _narrowest(policy))


def _narrowest(policy: Policy) -> float:
    """Returns the least bytes of an element of a gathered weight."""

    def itemsize(p: Precision) -> float:
        if p.products is not None:
            return PRODUCTS[p.products]
        named = [x for x in (p.param, p.gather, p.compute) if x is not None]
        return min([jnp.dtype(x).itemsize for x in named], default=1)

    return min(map(itemsize, policy.everywhere("precision").values()))


def estimate(
    size: StateSize,
    policy: Policy,
    mesh: Mesh | AbstractMesh,
    gpu: GPU,
    activity: Activity,
    examples: float,
    inputs: float = 0.0,
) -> Estimate:
    """Estimates a step with so many examples a device.

    The time is that of its roofline, the memory the sum of its parts. ``inputs`` are
    the bytes of all layers' inputs of an example, which "tensor" exchanges.
    """
    micro = policy.accumulate
    width = jnp.dtype(policy.precision.gather or jnp.float32).itemsize
    if policy.precision.products is not None:
        width = PRODUCTS[policy.precision.products]
    reshard = policy.reshard_after_forward
    gradients = size.trained_shards if micro == 1 else 0
    # Gathered weights: two layers and their gradients, or what is kept; and the root.
    kept = size.layer * 4
    if reshard is not True:
        kept += size.stacked / (1 if reshard is False else reshard)
    kept += size.elements - size.stacked
    if policy.defer_scatter:
        kept = 0  # the bound includes them
        gradients = size.trained  # of a micro-batch, beside their sum
    # Of all micro-batches, a stage holds those of as many as there are stages.
    stages = stages_of(mesh)
    saved = activity.saved * examples * min(stages, micro) / micro
    needed = memory_bound(size, policy) + gradients + kept * width + saved

    shards = shards_of(mesh) // stages
    slow, fast = _speed(shards, gpu), _speed(min(shards, gpu.domain), gpu)
    rounds = 1 if policy.defer_scatter else micro
    away = (shards - 1) / shards
    wire = rounds * size.elements * width * away / slow
    if not policy.defer_scatter and reshard is not False:
        again = slow if reshard is True or reshard > gpu.domain else fast
        wire += rounds * size.stacked * width * away / again
    sums = jnp.dtype(policy.precision.reduce or jnp.float32).itemsize
    wire += rounds * size.elements * sums * away / slow
    if (replicas := mesh.size // (shards * stages)) > 1:
        near = max(gpu.domain // shards, 1)  # replicas that share a host or domain
        speed = _speed(replicas, gpu, near)
        wire += 2 * size.trained_shards * (replicas - 1) / replicas / speed
    # With "tensor", a layer exchanges its tokens four times forward and four times
    # backward, with parts of the examples, half of it beside products; with "context",
    # its keys and values twice, and their gradients, halved because heads share them.
    exchanges = 8 * (mesh.shape.get(TENSOR, 1) - 1)
    exchanges += 3 * (mesh.shape.get(CONTEXT, 1) - 1)
    exchanged = exchanges * inputs * examples / fast
    products = gpu.product_seconds(activity.flops * examples)
    seconds = overlapped(products, wire) + exchanged / 2
    seconds /= 1 - bubble(stages, micro, policy.stages_per_device)
    # Activations are offloaded during the step, the optimizer's state around it.
    bus = gpu.host_bus
    seconds = max(seconds, 2 * activity.hosted * examples / bus)
    seconds += gpu.memory_seconds(2 * size.device) + size.host / bus
    return Estimate(seconds, needed)


def _speed(group: int, gpu: GPU, near: int = 0) -> float:
    """Returns bytes/s that a device of a group receives; ``near`` share a domain."""
    near, inside = near or gpu.domain, gpu.constants.link * gpu.link
    return inside if group <= near else min(inside, near * gpu.network_port)


def activity(program: Program) -> Activity:
    """Measures a traced step that reshards its layers, so keeps no weights of them."""
    job, found = program.job, _activations(program.jaxpr)
    examples = job.configured.settings.batch_size / program.mesh.size
    micro = examples / job.fsdp.policy.accumulate
    return Activity(
        product_flops(program.jaxpr)[0] / examples,
        (found["saved"] + found["layer"]) / micro,
        found["hosted"] / micro,
    )


def _activations(jaxpr: core.Jaxpr) -> collections.Counter[str]:
    """Counts the bytes that the forward's loops keep for the backward.

    They are "saved" on a device or "hosted"; those of the products in the largest
    "layer" (or chunk of the loss) are computed again in the backward.
    """
    found: collections.Counter[str] = collections.Counter()
    for eqn in jaxpr.eqns:
        stack, name = scopes_of(eqn), eqn.primitive.name
        if name == "scan" and stack.startswith(("jvp", "transpose")):
            inside = [x for x, _ in equations(scan_body(eqn))]
            names = ("dot_general", "block_scaled_dot")
            products = [x for x in inside if x.primitive.name in names]
            layer = sum(_nbytes(x.outvars[0].aval) for x in products)
            found["layer"] = max(found["layer"], layer)
            _, carry = scan_sizes(eqn)
            for var in eqn.outvars[carry:] if stack.startswith("jvp") else ():
                aval: Any = var.aval
                hosted = aval.memory_space == jax.memory.Space.Host
                found["hosted" if hosted else "saved"] += _nbytes(aval)
        elif name in (*CALLS, "scan", "shard_map") and (inner := open_inner(eqn)):
            inside = _activations(inner)
            layer = max(found.pop("layer", 0), inside.pop("layer", 0))
            found += inside + collections.Counter(layer=layer)
    return found


def _nbytes(x: Any) -> int:
    return x.size * x.dtype.itemsize


def ranked(estimates: Mapping[Candidate, Estimate], usable: int) -> list[Candidate]:
    """Returns the candidates in the order in which to compile them.

    The config as given; then the Pareto set of estimated time and memory, then that of
    the rest, and so on (non-dominated sorting; Deb et al. 2002,
    doi:10.1109/4235.996017). Of each set first the fastest, then the smallest, and
    then what is between those that came before, so that some of them show all of it.
    Last, by memory, are those that more than ``usable`` bytes are estimated for.
    """
    as_given = [candidate for candidate in estimates if not candidate.settings]
    others = [candidate for candidate in estimates if candidate.settings]
    left = sorted(others, key=lambda candidate: estimates[candidate])
    left = [candidate for candidate in left if estimates[candidate].memory <= usable]
    fronts = []
    while left:
        front, beaten, least = [], [], math.inf
        for candidate in left:
            if (memory := estimates[candidate].memory) < least:
                front.append(candidate)
                least = memory
            else:
                beaten.append(candidate)
        fronts += _ends_first(front)
        left = beaten
    large = [candidate for candidate in others if estimates[candidate].memory > usable]
    large.sort(key=lambda candidate: estimates[candidate].memory)
    return [*as_given, *fronts, *large]


def _ends_first(front: list[Candidate]) -> list[Candidate]:
    """Returns the first, the last, what is midway, and so on in both halves."""
    order = [0, len(front) - 1]
    spans = collections.deque([(0, len(front) - 1)])
    while spans:
        low, high = spans.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            spans += [(low, middle), (middle, high)]
    return [front[i] for i in dict.fromkeys(order)]

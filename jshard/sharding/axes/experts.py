"""Experts, maybe split over the mesh axis "expert".

A device has some of the experts, whole, and tokens for all of them. It sends each token
to the devices of its experts, and gets their results back, by one all-to-all each way
(GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3.2).

No token is dropped. Programs have static shapes, so an exchange carries a fixed number
of rows from each device to each expert. A first round has room for somewhat more than
an even share. Only if some device has more for an expert, further rounds follow, in a
loop that the devices which exchange tokens leave together. Results do not depend on how
many there are.

With as many rows for each expert, their products are batched ones. Grouped products
(``lax.ragged_dot``) would not need the padding, but XLA multiplies all rows with the
matrices of all experts there, on CPUs and on GPUs (openxla/xla#40189). On GPUs whole
experts are therefore computed in rounds, too.

Shape suffixes: N tokens, D width, K experts of a token, M choices (N times K), E
experts, H experts held by a device, C rows of a round from one device for one expert,
R rows of a round for one expert (C from each device of the axis).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jshard.sharding.settings.mesh import EXPERT, TENSOR, manual_axes, on_gpus
from jshard.sharding.settings.precision import at_least_float32
from jshard.sharding.settings.scopes import EXCHANGE_TOKENS, FURTHER_ROUNDS
from jshard.system.errors import UserError


def on_experts(
    apply: Callable[[Any, jax.Array, jax.Array | None, jax.Array | None], jax.Array],
    modules: Any,
    x_ND: jax.Array,
    expert_NK: jax.Array,
    weight_NK: jax.Array,
    num_experts: int,
    capacity: float = 1.25,
) -> jax.Array:
    """Returns the weighted sum of each token's K experts, wherever they are.

    Args:
      apply: the experts' function of ``modules``, rows, how many of these each expert
        has, and what their results are multiplied with. On CPUs, where the device has
        all experts, rows are (M, D) in the order of their experts, the numbers (E,),
        and the factors None. Otherwise rows are (H, R, D), the numbers None (each
        expert has R, of which some are padding), and the factors (H, R). It is best to
        multiply before the last product, so that no backward needs results.
      modules: a module or a tuple of modules, whose every parameter has a first
        dimension of experts: all of them, or those that this device holds.
      x_ND: this device's tokens.
      expert_NK: the experts of each, from 0 to E - 1.
      weight_NK: their weights.
      num_experts: E.
      capacity: rows that the first round carries from each device to each expert, as a
        multiple of an even share.

    Returns:
      The sums, (N, D).

    Raises:
      UserError: the experts are not split as the devices of "expert" need it.
    """
    (N, K), expert_M = expert_NK.shape, expert_NK.reshape(-1)
    order_M = jnp.argsort(expert_M)  # stable: the choices in their experts' order
    tokens_E = jnp.bincount(expert_M, length=num_experts)
    held = len(jax.tree.leaves(nnx.state(modules))[0])
    if held == num_experts and not on_gpus():
        x_MD = _permuted(jnp.repeat(x_ND, K, axis=0), order_M)
        y_MD = _permuted(apply(modules, x_MD, tokens_E, None), jnp.argsort(order_M))
        y_NKD = y_MD.reshape(N, K, -1)
        weight_NK1 = weight_NK[:, :, None].astype(y_NKD.dtype)
        return jnp.sum(y_NKD * weight_NK1, axis=1)
    devices = lax.axis_size(EXPERT) if EXPERT in manual_axes() else 1
    devices = 1 if held == num_experts else devices
    if held * devices != num_experts:
        raise UserError(
            f"experts: a device holds {held} of {num_experts}, but {devices} devices "
            "share them: split their parameters over the mesh axis 'expert', or gather "
            "them whole"
        )
    start_E = jnp.cumsum(tokens_E) - tokens_E
    place_M = jnp.argsort(order_M) - start_E[expert_M]
    most = jnp.max(tokens_E)
    if devices > 1:
        with jax.named_scope(EXCHANGE_TOKENS):
            # Those that run the same collectives leave the loop together: with "tensor"
            # all, as what it gathers has sums over other axes in the backward.
            axes = manual_axes()
            most = lax.pmax(most, axes if TENSOR in axes else EXPERT)
    route = _Route(expert_M, order_M, place_M, start_E, tokens_E, most)
    y_MD = _in_rounds(apply, modules, x_ND, weight_NK, route, capacity, devices)
    return jnp.sum(y_MD.reshape(N, K, -1), axis=1)


def _permuted(x_MD: jax.Array, order_M: jax.Array) -> jax.Array:
    # That indices are unique makes the gradient, a scatter, deterministic on GPUs.
    return x_MD.at[order_M].get(unique_indices=True, mode="promise_in_bounds")


def capacities(choices: int, experts: int, capacity: float) -> tuple[int, int]:
    """Returns the rows for each expert, of the first round and of further ones.

    A further round carries half of an even share, so that a device that has somewhat
    more than the first round carries costs little.
    """
    first, further = (
        min(8 * max(1, math.ceil(factor * choices / experts / 8)), choices)
        for factor in (capacity, 0.5)
    )
    return first, further


class _Route(NamedTuple):
    """Where this device's choices go."""

    expert_M: jax.Array  # the expert of each choice
    order_M: jax.Array  # the choices in the order of their experts
    place_M: jax.Array  # each choice's place among those of the same expert
    start_E: jax.Array  # where in order_M those of each expert start
    tokens_E: jax.Array  # how many there are of each expert
    most: jax.Array  # the most that a device which shares the experts has for one


def _in_rounds(
    apply: Callable[..., jax.Array],
    modules: Any,
    x_ND: jax.Array,
    weight_NK: jax.Array,
    route: _Route,
    capacity: float,
    devices: int,
) -> jax.Array:
    """Returns the weighted results of all choices, (M, D)."""
    graphdef, state = nnx.split(modules)
    inputs = _Inputs(state, x_ND, weight_NK.astype(x_ND.dtype))
    choices, experts = len(route.order_M), len(route.tokens_E)
    first, further = capacities(choices, experts, capacity)

    def compute(state: Any, x_ECD: jax.Array, weight_EC: jax.Array) -> jax.Array:
        if devices == 1:
            return apply(nnx.merge(graphdef, state), x_ECD, None, weight_EC)
        with jax.named_scope(EXCHANGE_TOKENS):
            x_HRD, weight_HR = (
                lax.all_to_all(x, EXPERT, 0, 1, tiled=True) for x in (x_ECD, weight_EC)
            )
        y_HRD = apply(nnx.merge(graphdef, state), x_HRD, None, weight_HR)
        with jax.named_scope(EXCHANGE_TOKENS):
            return lax.all_to_all(y_HRD, EXPERT, 1, 0, tiled=True)

    y_MD = _round(compute, 0, first, inputs, route)
    if first == choices:
        return y_MD
    even = choices / experts
    scope = f"{FURTHER_ROUNDS} from {first / even:.4g} by {further / even:.4g}"
    return _further_rounds(compute, first, further, scope)(y_MD, inputs, route)


class _Inputs(NamedTuple):
    """What a round computes with, and has gradients."""

    state: Any  # of the modules
    x_ND: jax.Array
    weight_NK: jax.Array


# Maps parameters, this device's (E, C, D) rows and (E, C) factors to (E, C, D).
_Compute = Callable[[Any, jax.Array, jax.Array], jax.Array]


def _round(
    compute: _Compute, begin: Any, size: int, inputs: _Inputs, route: _Route
) -> jax.Array:
    """Returns the results of places ``begin`` to ``begin + size`` of each expert.

    They are (M, D), with zeros for all other choices.
    """
    M, E, K = len(route.order_M), len(route.tokens_E), inputs.weight_NK.shape[1]
    # Indices are unique, also those of padding, which are out of bounds.
    place_C = begin + jnp.arange(size)
    choice_EC = route.order_M.at[route.start_E[:, None] + place_C].get(mode="clip")
    padding_EC = M + jnp.arange(E * size).reshape(E, size)
    choice_EC = jnp.where(place_C < route.tokens_E[:, None], choice_EC, padding_EC)
    place_M = route.place_M - begin
    slot_M = jnp.where(
        (place_M >= 0) & (place_M < size),
        route.expert_M * size + place_M,
        E * size + jnp.arange(M),
    )

    x_ECD = _rows(jnp.repeat(inputs.x_ND, K, axis=0), choice_EC, slot_M)
    weight_EC = _rows(inputs.weight_NK.reshape(-1), choice_EC, slot_M)
    y_ECD = compute(inputs.state, x_ECD, weight_EC)
    return _rows(y_ECD.reshape(E * size, -1), slot_M, choice_EC)


@jax.custom_vjp
def _rows(x: jax.Array, index: jax.Array, back: jax.Array) -> jax.Array:
    """Returns rows of ``x`` by unique indices, zeros for those out of bounds.

    ``back`` is where each row of ``x`` went, by which the gradient is rows, too. JAX's
    own would be scattered into zeros, and XLA would make those of all layers at once.
    """
    del back
    return x.at[index].get(unique_indices=True, mode="fill", fill_value=0)


def _rows_backward(indices: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple:
    index, back = indices
    dy = dy.reshape(index.size, *dy.shape[index.ndim :])
    return _rows(dy, back.reshape(-1), index), None, None


_rows.defvjp(lambda x, *indices: (_rows(x, *indices), indices), _rows_backward)


def _further_rounds(
    compute: _Compute, first: int, size: int, scope: str
) -> Callable[..., jax.Array]:
    """Returns a function that adds the results of all rounds but the first.

    How many there are is known only when they run. Their backward exchanges tokens
    again and computes again; nothing of theirs is kept.
    """

    def loop(one: Callable, init: Any, end: jax.Array) -> Any:
        """Returns ``init`` after ``one(begin, it)`` of each round."""
        state = jnp.full_like(end, first), init
        goes_on = lambda state: state[0] < end
        body = lambda state: (state[0] + size, one(*state))
        return lax.while_loop(goes_on, body, state)[1]

    @jax.named_scope(scope)
    def add(y_MD: jax.Array, inputs: _Inputs, route: _Route) -> jax.Array:
        one = lambda begin, y_MD: y_MD + _round(compute, begin, size, inputs, route)
        return loop(one, y_MD, route.most)

    def forward(y_MD: jax.Array, inputs: _Inputs, route: _Route) -> tuple:
        return add(y_MD, inputs, route), (inputs, route)

    @jax.named_scope(scope)
    def backward(kept: tuple, dy_MD: jax.Array) -> tuple:
        inputs, route = kept

        def one(begin: jax.Array, sums: _Inputs) -> _Inputs:
            results = lambda inputs: _round(compute, begin, size, inputs, route)
            _, pullback = jax.vjp(results, inputs)
            return jax.tree.map(jnp.add, sums, *pullback(dy_MD))

        # In bfloat16 a sum stops to grow after 256 equal rounds. These zeros are this
        # layer's own: XLA would make those of all layers at once.
        zero = (route.most < 0).astype(jnp.float32)
        zeros = jax.tree.map(
            lambda x: jnp.full(x.shape, zero, at_least_float32(x).dtype), inputs
        )
        sums = loop(one, zeros, route.most)
        sums = jax.tree.map(lambda x, like: x.astype(like.dtype), sums, inputs)
        return dy_MD, sums, None

    adding = jax.custom_vjp(add)
    adding.defvjp(forward, backward)
    return adding

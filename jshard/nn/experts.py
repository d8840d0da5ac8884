"""Experts that are split over the mesh axis "expert".

A device has some of the experts, whole, and tokens for all of them. It sends each token
to the devices of its experts, and gets their results back, by one all-to-all each way
(GShard, Lepikhin et al. 2020, arXiv:2006.16668, section 3.2).

No token is dropped. Programs have static shapes, so an exchange carries a fixed number
of rows from each device to each expert. A first round has room for somewhat more than
an even share. Only if some device has more for an expert, further rounds follow, in a
loop that all devices leave together. Results do not depend on how many there are.

With as many rows for each expert, their products are batched ones. Grouped products
(``lax.ragged_dot``) would not need the padding, but XLA multiplies all rows with the
matrices of all experts there, on CPUs and on GPUs.

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

from jshard.comm.varying import vary
from jshard.errors import UserError
from jshard.mesh import EXPERT, manual_axes
from jshard.scopes import EXCHANGE_TOKENS, FURTHER_ROUNDS


def on_experts(
    apply: Callable[[Any, jax.Array, jax.Array | None], jax.Array],
    modules: Any,
    x_ND: jax.Array,
    expert_NK: jax.Array,
    num_experts: int,
    capacity: float = 1.25,
) -> tuple[jax.Array, jax.Array]:
    """Applies each token's K experts to it, wherever they are.

    Args:
      apply: the experts' function of ``modules``, rows, and how many of these each
        expert has. Where the device has all experts, rows are (M, D) in the order of
        their experts, and the numbers (E,). Otherwise rows are (H, R, D) and the
        numbers None: each expert has R, of which some are padding.
      modules: a module or a tuple of modules, whose every parameter has a first
        dimension of experts: all of them, or those that this device holds.
      x_ND: this device's tokens.
      expert_NK: the experts of each, from 0 to E - 1.
      num_experts: E.
      capacity: rows that the first round carries from each device to each expert, as a
        multiple of an even share.

    Returns:
      Each choice's result, (N, K, D), and how many tokens of this device chose each
      expert, (E,).

    Raises:
      UserError: the experts are not split as the devices of "expert" need it.
    """
    (N, K), expert_M = expert_NK.shape, expert_NK.reshape(-1)
    order_M = jnp.argsort(expert_M)  # stable
    tokens_E = jnp.bincount(expert_M, length=num_experts)
    held = len(jax.tree.leaves(nnx.state(modules))[0])
    if held == num_experts:
        x_MD = _permuted(jnp.repeat(x_ND, K, axis=0), order_M)
        y_MD = _permuted(apply(modules, x_MD, tokens_E), jnp.argsort(order_M))
    else:
        _check_split(held, num_experts)
        route = _route(expert_M, order_M, tokens_E)
        y_MD = _exchanged(apply, modules, x_ND, route, capacity)
    return y_MD.reshape(N, K, -1), tokens_E


def _permuted(x_MD: jax.Array, order_M: jax.Array) -> jax.Array:
    # That indices are unique makes the gradient, a scatter, deterministic on GPUs.
    return x_MD.at[order_M].get(unique_indices=True, mode="promise_in_bounds")


def capacities(choices: int, experts: int, capacity: float) -> tuple[int, int]:
    """Returns the rows for each expert, of the first round and of further ones.

    A further round carries half of an even share, so that a device that has somewhat
    more than the first round carries costs little.

    Args:
      choices: of a device's tokens.
      experts: of all devices.
      capacity: of the first round, as a multiple of an even share.
    """
    first, further = (
        min(8 * max(1, math.ceil(factor * choices / experts / 8)), choices)
        for factor in (capacity, 0.5)
    )
    return first, further


def _check_split(held: int, num_experts: int) -> None:
    devices = lax.axis_size(EXPERT) if EXPERT in manual_axes() else 1
    if held * devices != num_experts:
        raise UserError(
            f"experts: a device holds {held} of {num_experts}, but {devices} devices "
            "share them: split their parameters over the mesh axis 'expert', or gather "
            "them whole"
        )


class _Route(NamedTuple):
    """Where this device's choices go.

    Attributes:
      expert_M: the expert of each choice.
      order_M: the choices in the order of their experts.
      place_M: each choice's place among those of the same expert.
      start_E: where in ``order_M`` those of each expert start.
      tokens_E: how many there are of each expert.
      most: the most that any device has for an expert.
    """

    expert_M: jax.Array
    order_M: jax.Array
    place_M: jax.Array
    start_E: jax.Array
    tokens_E: jax.Array
    most: jax.Array


def _route(expert_M: jax.Array, order_M: jax.Array, tokens_E: jax.Array) -> _Route:
    expert_M, order_M, tokens_E = map(vary, (expert_M, order_M, tokens_E))
    start_E = jnp.cumsum(tokens_E) - tokens_E
    place_M = jnp.argsort(order_M) - start_E[expert_M]
    with jax.named_scope(EXCHANGE_TOKENS):
        # Over all axes, so that all devices run the same collectives.
        most = lax.pmax(jnp.max(tokens_E), manual_axes())
    return _Route(expert_M, order_M, place_M, start_E, tokens_E, most)


def _exchanged(
    apply: Callable[..., jax.Array],
    modules: Any,
    x_ND: jax.Array,
    route: _Route,
    capacity: float,
) -> jax.Array:
    """Returns the results of all choices, (M, D)."""
    graphdef, state = nnx.split(modules)
    state, x_ND = jax.tree.map(vary, state), vary(x_ND)
    choices, experts = len(route.order_M), len(route.tokens_E)
    first, further = capacities(choices, experts, capacity)

    def compute(state: Any, x_ECD: jax.Array) -> jax.Array:
        with jax.named_scope(EXCHANGE_TOKENS):
            x_HRD = lax.all_to_all(x_ECD, EXPERT, 0, 1, tiled=True)
        y_HRD = apply(nnx.merge(graphdef, state), x_HRD, None)
        with jax.named_scope(EXCHANGE_TOKENS):
            return lax.all_to_all(y_HRD, EXPERT, 1, 0, tiled=True)

    y_MD = _round(compute, 0, first, state, x_ND, route)
    if first == choices:
        return y_MD
    return _further_rounds(compute, first, further)(y_MD, state, x_ND, route)


# Maps (parameters, (E, C, D) rows of this device) to their results.
_Compute = Callable[[Any, jax.Array], jax.Array]


def _round(
    compute: _Compute, begin: Any, size: int, state: Any, x_ND: jax.Array, route: _Route
) -> jax.Array:
    """Computes places ``begin`` to ``begin + size`` of each expert's choices.

    Returns:
      The results of these choices, and zeros for all others, (M, D).
    """
    M, E = len(route.order_M), len(route.tokens_E)
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

    x_ECD = _rows(jnp.repeat(x_ND, M // len(x_ND), axis=0), choice_EC)
    y_ECD = compute(state, x_ECD)
    return _rows(y_ECD.reshape(E * size, -1), slot_M)


def _rows(x_MD: jax.Array, index: jax.Array) -> jax.Array:
    """Returns rows of ``x_MD`` by unique indices, zeros for those out of bounds."""
    return x_MD.at[index].get(unique_indices=True, mode="fill", fill_value=0)


def _further_rounds(
    compute: _Compute, first: int, size: int
) -> Callable[..., jax.Array]:
    """Returns a function that adds the results of all rounds but the first.

    How many there are is known only when they run. Their backward exchanges tokens
    again and computes again; nothing of theirs is kept.
    """

    @jax.named_scope(FURTHER_ROUNDS)
    def add(y_MD: jax.Array, state: Any, x_ND: jax.Array, route: _Route) -> jax.Array:
        def one(begin: jax.Array, y_MD: jax.Array) -> jax.Array:
            return y_MD + _round(compute, begin, size, state, x_ND, route)

        return _loop(first, size, route.most, one, y_MD)

    def forward(*inputs: Any) -> tuple[jax.Array, Any]:
        return add(*inputs), inputs[1:]

    @jax.named_scope(FURTHER_ROUNDS)
    def backward(inputs: Any, dy_MD: jax.Array) -> tuple:
        *moving, route = inputs

        def one(begin: jax.Array, sums: Any) -> Any:
            def results(state: Any, x_ND: jax.Array) -> jax.Array:
                return _round(compute, begin, size, state, x_ND, route)

            _, pullback = jax.vjp(results, *moving)
            return jax.tree.map(jnp.add, sums, pullback(dy_MD))

        sums = tuple(jax.tree.map(lambda x: vary(jnp.zeros_like(x)), moving))
        return dy_MD, *_loop(first, size, route.most, one, sums), None

    adding = jax.custom_vjp(add)
    adding.defvjp(forward, backward)
    return adding


def _loop(
    begin: int,
    size: int,
    end: jax.Array,
    one: Callable[[jax.Array, Any], Any],
    init: Any,
) -> Any:
    """Returns ``init`` after ``one(place, it)`` at places from ``begin`` to ``end``."""

    def body(state: Any) -> Any:
        return state[0] + size, one(*state)

    start = jnp.full_like(end, begin)
    return lax.while_loop(lambda state: state[0] < end, body, (start, init))[1]


def exchanged_bytes(
    tokens: int,
    experts_per_token: int,
    num_experts: int,
    width: int,
    devices: int,
    *,
    capacity: float = 1.25,
    itemsize: int = 2,
    passes: int = 3,
) -> int:
    """Returns the bytes that a device receives to exchange tokens for one layer.

    An all-to-all brings it what the other devices have for its experts, ``capacity``
    times an even share, and a second one the results for its own tokens. This is of the
    first round, and if there are several micro-batches, of each.

    Args:
      tokens: N, of each device.
      experts_per_token: K.
      num_experts: E.
      width: D.
      devices: size of the axis "expert".
      capacity: as of ``on_experts``.
      itemsize: bytes of an activation's element.
      passes: forward and backward are 2; 3 if the backward computes the layer again.
    """
    rows, _ = capacities(tokens * experts_per_token, num_experts, capacity)
    leaving = num_experts // devices * (devices - 1) * rows
    return 2 * passes * leaving * width * itemsize


def gathered_bytes(
    parameters: int,
    devices: int,
    *,
    gathers: int = 2,
    itemsize: int = 2,
    reduce_itemsize: int = 4,
) -> int:
    """Returns the bytes that a device receives more, to gather a layer's experts.

    Split over e devices and sharded over f others, a device gathers 1/e of the experts,
    of which it has 1/f. Gathered like any other weight they are all of them, of which
    it has 1/ef. The difference is 1 - 1/e of all experts, and the same again for the
    gradients that are scattered. If there are several micro-batches, it is of each.

    Args:
      parameters: of all of the layer's experts.
      devices: e, size of the axis "expert".
      gathers: 1 in the forward, and 1 in the backward unless weights are kept.
      itemsize: bytes of a gathered element.
      reduce_itemsize: bytes of a gradient's element; 0 if the experts are not trained.
    """
    others = parameters - parameters // devices
    return others * (gathers * itemsize + reduce_itemsize)

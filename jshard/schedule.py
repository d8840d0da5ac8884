"""The scanned forward and backward: when each gather and scatter happens.

Forward, a layer at a time: all_gather its weights, run it, drop them, keep the
residuals that ``remat`` allows. Backward, in reverse: all_gather the weights that the
gradient reads, rebuild what was not kept, transpose the layer, reduce_scatter its
gradients. Gradients, like parameters, exist as shards only.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jshard.collectives import (
    Placement,
    abstract_like,
    all_gather,
    is_float,
    join,
    placements,
    reduce_scatter,
    split,
    vary,
    varying,
    zeros_like,
)
from jshard.errors import UserError
from jshard.first_layers import linearize_stack
from jshard.mesh import manual_axes
from jshard.remat import LinearizedLayer, check_remat


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How one unit (a Unit, or each layer of a Stack) treats its weights.

    Attributes:
      remat: what the backward keeps; see ``Policy.remat``.
      reshard_after_forward: True drops gathered weights after the forward and gathers
        them again for the backward; False keeps them; a number keeps them sharded
        over groups of so many devices, which the backward gathers from.
      first_k: to how many layers of a Stack ``remat`` applies; the others keep all
        that their backward reads. None is all layers.
    """

    remat: Any = "full"
    reshard_after_forward: bool | int = True
    first_k: int | None = None


def run_unit(
    fn: Callable[[list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
) -> list[jax.Array]:
    """One gather, one call of ``fn(weights, xs, inputs)``, one scatter backward.

    Args:
      fn: the unit on flat lists of arrays; returns a flat list.
      shards: local shards of the unit's own parameters.
      places: their placements.
      xs: what else belongs to the unit (its state, shards of units inside it).
      inputs: the call's arguments.
      policy: remat and reshard.
      moving_xs: which of ``xs`` have gradients.
    """
    xs, inputs = list(xs), [vary(x) if is_float(x) else x for x in inputs]
    layer = LinearizedLayer(
        lambda weights, xs, carry, args: fn(weights, xs, carry),
        _full([abstract_like(s) for s in shards], places),
        [abstract_like(x) for x in xs],
        [abstract_like(x) for x in inputs],
        [],
        differentiable=[
            *(p.trainable and is_float(s) for s, p in zip(shards, places, strict=True)),
            *moving_xs,
            *map(is_float, inputs),
        ],
        remat=policy.remat,
        prevent_cse=True,
    )

    @jax.custom_vjp
    def run(shards, xs, inputs, args):
        shards, inputs = _after(shards, inputs)
        return layer.call(_gather(shards, places), xs, inputs, args)

    def forward(shards, xs, inputs, args):
        needed, inputs = _after(shards, inputs)
        weights = _gather(needed, places)
        outputs, kept = layer.forward(weights, xs, inputs, args)
        weights = _reshard(weights, places, layer, policy)
        return outputs, (shards, xs, args, kept, weights)

    def backward(saved, cotangents):
        shards, xs, args, kept, weights = saved
        cotangents = _floats(cotangents, layer.outputs)
        needed = _to_gather(weights, shards, layer)
        if policy.reshard_after_forward:
            needed, cotangents = _after(needed, cotangents)
        weights = _gather_read(needed, places, layer, policy)
        grads, xs_grads, input_grads, arg_grads = layer.backward(
            weights, xs, args, kept, cotangents
        )
        return _scatter(grads, places, shards), xs_grads, input_grads, arg_grads

    run.defvjp(forward, backward)
    return run(list(shards), xs, inputs, layer.consts)


def run_stack(
    fn: Callable[[list, list, list, list], list],
    shards: Sequence[jax.Array],
    places: Sequence[Placement],
    xs: Sequence[jax.Array],
    carry: Sequence[jax.Array],
    args: Sequence[jax.Array],
    policy: UnitPolicy,
    moving_xs: Sequence[bool],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Scans ``fn(weights, xs, carry, args) -> [*carry, *ys]`` over stacked layers.

    Args:
      fn: one layer on flat lists of arrays.
      shards: local shards of the layers' own parameters, (L, ...) each.
      places: their placements.
      xs: what else belongs to each layer, (L, ...) each.
      carry: enters the first layer.
      args: the same for every layer.
      policy: remat and reshard.
      moving_xs: which of ``xs`` have gradients.

    Returns:
      The last carry, and the layers' ys stacked.
    """
    xs = list(xs)
    carry, args = [vary(x) for x in carry], [vary(x) for x in args]
    length = next(x.shape[0] for x in [*shards, *xs])
    # XLA inlines a loop of one trip: its layer is then scheduled like a Unit.
    single = length == 1

    def linearize(remat: Any) -> LinearizedLayer:
        return LinearizedLayer(
            fn,
            _full([abstract_like(s, layer=True) for s in shards], places),
            [abstract_like(x, layer=True) for x in xs],
            [abstract_like(x) for x in carry],
            [abstract_like(x) for x in args],
            differentiable=[
                *(
                    place.trainable and is_float(shard)
                    for shard, place in zip(shards, places, strict=True)
                ),
                *moving_xs,
                *map(is_float, [*carry, *args]),
            ],
            remat=remat,
            prevent_cse=single,
        )

    layer = linearize_stack(linearize, policy.remat, policy.first_k, length)
    check_carry(carry, layer.outputs)
    num_carry = len(carry)

    @jax.custom_vjp
    def run(shards, xs, carry, args):
        def body(carry, slices):
            shards, xs = slices
            if single:
                shards, carry = _after(shards, carry)
            outputs = layer.call(_gather(shards, places), xs, carry, args)
            return _carry_like(outputs[:num_carry], carry), outputs[num_carry:]

        return lax.scan(body, carry, (shards, xs))

    def forward(shards, xs, carry, args):
        def body(state, slices):
            carry, buffers = state
            index, shards, xs = slices
            if single:
                shards, carry = _after(shards, carry)
            weights = _gather(shards, places)
            outputs, kept, buffers = layer.forward_at(
                index, buffers, weights, xs, carry, args
            )
            keep = _reshard(weights, places, layer, policy)
            carry = _carry_like(outputs[:num_carry], carry)
            return (carry, buffers), (outputs[num_carry:], kept, keep)

        (carry, buffers), (ys, kept, weights) = lax.scan(
            body, (carry, layer.buffers()), (jnp.arange(length), shards, xs)
        )
        return (carry, ys), (shards, xs, args, kept, buffers, weights)

    def backward(saved, cotangents):
        shards, xs, args, kept, buffers, weights = saved
        carry_ct = _floats(cotangents[0], layer.outputs[:num_carry])
        ys_ct = _floats(cotangents[1], layer.outputs[num_carry:])
        moving_args = [is_float(a) for a in args]
        args_ct = [zeros_like(a) for a in args if is_float(a)]

        def body(sums, slices):
            carry_ct, args_ct = sums
            index, shards, xs, kept, weights, ys_ct = slices
            needed = _to_gather(weights, shards, layer)
            if single and policy.reshard_after_forward:
                needed, carry_ct = _after(needed, carry_ct)
            weights = _gather_read(needed, places, layer, policy)
            grads, xs_grads, carry_grads, arg_grads = layer.backward_at(
                index, buffers, weights, xs, args, kept, [*carry_ct, *ys_ct]
            )
            moved = [g for g, m in zip(arg_grads, moving_args, strict=True) if m]
            args_ct = [a + g for a, g in zip(args_ct, moved, strict=True)]
            carry_ct = [g for g in carry_grads if g is not None]
            return (carry_ct, args_ct), (_scatter(grads, places, shards), xs_grads)

        slices = (jnp.arange(length), shards, xs, kept, weights, ys_ct)
        (carry_ct, args_ct), (grads, xs_grads) = lax.scan(
            body, (carry_ct, args_ct), slices, reverse=True
        )
        moving = iter(carry_ct)
        carry_grads = [next(moving) if is_float(c) else None for c in carry]
        moving = iter(args_ct)
        arg_grads = [next(moving) if m else None for m in moving_args]
        return grads, xs_grads, carry_grads, arg_grads

    run.defvjp(forward, backward)
    return run(list(shards), xs, carry, [*args, *layer.consts])


def scan_layers(
    fn: Callable[..., Any],
    stacked_params: Any,
    carry: Any,
    *args: Any,
    specs: Any,
    remat: Any = "full",
    reshard_after_forward: bool | int = True,
    dtype: Any = None,
    reduce_dtype: Any = None,
) -> Any:
    """Applies stacked layers to ``carry``, gathering one layer's weights at a time.

    For use inside ``shard_map`` over a mesh with an "fsdp" axis, on plain pytrees.

    Args:
      fn: ``fn(params, carry, *args)`` of one layer with full weights, returning the
        new carry, or ``(carry, aux)``.
      stacked_params: pytree of local shards, (L, ...) each.
      carry: pytree of arrays that goes from layer to layer.
      *args: pytrees of arrays, the same for every layer.
      specs: a PartitionSpec for each leaf of ``stacked_params``, layer dimension
        included.
      remat: what the backward keeps; see ``Policy.remat``.
      reshard_after_forward: whether weights are gathered again for the backward; a
        number keeps them sharded over groups of so many devices until then.
      dtype: dtype on the wire of the gathers and of the weights ``fn`` sees.
      reduce_dtype: dtype of the gradients' reduction.

    Returns:
      The last carry, or ``(carry, aux)`` with aux stacked.

    Raises:
      UserError: the carry changes its shape or dtype, or ``remat`` is not known.
    """
    check_remat(remat)
    shards, params_tree = jax.tree.flatten(stacked_params)
    places = placements(specs, stacked_params, dtype=dtype, reduce_dtype=reduce_dtype)
    inputs, inputs_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, (carry, args)))
    num_carry = jax.tree.structure(carry).num_leaves
    returned: list[Any] = []

    def layer(weights, xs, carry_leaves, arg_leaves):
        del xs
        params = jax.tree.unflatten(params_tree, weights)
        arguments = [*carry_leaves, *arg_leaves[: len(inputs) - num_carry]]
        state, extra = jax.tree.unflatten(inputs_tree, arguments)
        state, aux, has_aux = split_aux(fn(params, state, *extra), carry)
        leaves, tree = jax.tree.flatten(aux)
        returned[:] = [has_aux, tree]
        return [*jax.tree.leaves(state), *leaves]

    out, ys = run_stack(
        layer,
        [
            vary(s) if p.dim is None else s
            for s, p in zip(shards, jax.tree.leaves(places), strict=True)
        ],
        jax.tree.leaves(places),
        [],
        inputs[:num_carry],
        inputs[num_carry:],
        UnitPolicy(remat, reshard_after_forward),
        [],
    )
    last = jax.tree.unflatten(jax.tree.structure(carry), out)
    has_aux, tree = returned
    return (last, jax.tree.unflatten(tree, ys)) if has_aux else last


def split_aux(result: Any, carry: Any) -> tuple[Any, Any, bool]:
    """Takes a layer's result, ``carry`` or ``(carry, aux)``, apart."""
    same = jax.tree.structure(carry)
    if jax.tree.structure(result) == same:
        return result, None, False
    if isinstance(result, tuple) and len(result) == 2:
        if jax.tree.structure(result[0]) == same:
            return result[0], result[1], True
    raise UserError(
        "a stacked layer must return its first argument's tree, or a pair of that and "
        f"aux; got {jax.tree.structure(result)} for {same}"
    )


def check_carry(carry: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raises UserError unless a layer returns the shapes and dtypes it is given."""
    for before, after in zip(carry, outputs, strict=False):
        if before.shape != after.shape or before.dtype != after.dtype:
            raise UserError(
                f"a stacked layer turns {before.dtype}{list(before.shape)} into "
                f"{after.dtype}{list(after.shape)}; equal layers must keep shape and "
                "dtype, so cast the stack's input or the layer's output"
            )


def _carry_like(outputs: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    return [vary(o, tuple(varying(c))) for o, c in zip(outputs, carry, strict=True)]


def _full(shards: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    """Abstract gathered weights of one layer."""
    traced = jax.make_jaxpr(lambda shards: _gather(shards, places))(list(shards))
    return list(map(abstract_like, traced.out_avals))


def _gather(shards: Sequence[Any], places: Sequence[Placement]) -> list[Any]:
    return [all_gather(vary(s), p) for s, p in zip(shards, places, strict=True)]


def _reshard(
    weights: list[Any],
    places: Sequence[Placement],
    layer: LinearizedLayer,
    policy: UnitPolicy,
) -> list[Any] | None:
    """What is kept of gathered weights: of those that the backward reads."""
    if policy.reshard_after_forward is True:
        return None
    group = int(policy.reshard_after_forward)  # 0 where False: all of them
    return [
        split(weights[i], places[i], group) if group else weights[i]
        for i in layer.weights_read
    ]


def _to_gather(
    kept: list[Any] | None, shards: Sequence[Any], layer: LinearizedLayer
) -> list[Any]:
    """What the backward gathers: the weights kept in groups, or else the shards."""
    return [shards[i] for i in layer.weights_read] if kept is None else kept


def _gather_read(needed, places, layer, policy) -> list[Any]:
    """The weights that the backward reads, None for the others."""
    group = policy.reshard_after_forward
    weights: list[Any] = [None] * len(places)
    for i, part in zip(layer.weights_read, needed, strict=True):
        if group is True:
            weights[i] = all_gather(vary(part), places[i])
        else:
            weights[i] = join(part, places[i], int(group)) if group else part
    return weights


def _after(
    shards: Sequence[Any], arrived: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Both as they are, but to XLA the shards are not there before ``arrived`` is.

    Else XLA could gather the weights of many units before the first runs, or merge
    the backward's gathers with the forward's and keep the weights in between.

    A barrier types all that passes it as varying, so what does not vary stays out.
    """
    late = [set(varying(x)) == set(manual_axes()) for x in arrived]
    passing = [x for x, is_late in zip(arrived, late, strict=True) if is_late]
    needed, passing = lax.optimization_barrier((list(shards), passing))
    passed = iter(passing)
    return needed, [
        next(passed) if is_late else x for x, is_late in zip(arrived, late, strict=True)
    ]


def _scatter(grads, places, shards) -> list[Any]:
    return [
        None if grad is None else reduce_scatter(grad, place, shard)
        for grad, place, shard in zip(grads, places, shards, strict=True)
    ]


def _floats(cotangents: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    return [c for c, o in zip(cotangents, outputs, strict=True) if is_float(o)]

"""Traces a layer once, and splits it into outputs, residuals and transpose.

Some of the residuals that the remat policy would keep depend on the weights alone: the
gathered weights, their casts, their transposes, products of two weights. These are
*not* kept. The backward rebuilds them from weights that it gathers again. A dataflow
analysis of the jaxpr finds them, so this holds for every policy, including
``everything_saveable``. A JAX policy sees only one primitive at a time, and by itself
would keep the full weights of every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jshard.compat.jaxprs import (
    CALLS,
    consts_as_inputs,
    find,
    line_of,
    needed_for,
    nested,
    run_used,
    without_unused,
)
from jshard.errors import UserError
from jshard.fsdp.policy import ATTENTION_OPERANDS, INPUTS, Names, Offload, Policy
from jshard.fsdp.precision import is_float
from jshard.layout.placement import Placement
from jshard.unit.dataflow import check_partial_sums, dependencies


class Inputs(NamedTuple):
    """The inputs of a layer, or their gradients, as pytrees of arrays.

    Also those of all layers of a Stack, with weights and xs of shape (L, ...).
    """

    weights: Any  # full weights; of a Stack, this device's shards
    xs: Any  # the layer's other arrays: state, and shards of units inside it
    carry: Any  # what one layer passes to the next; for a Unit, the call's arguments
    args: Any  # what all layers share


# A layer's function as a program: its abstract inputs, whose args end with those for
# the program's constants (arrays that the function closes over, which get gradients);
# the program; and its abstract outputs.
Traced = tuple[Inputs, core.ClosedJaxpr, Any]


def trace_layer(
    fn: Callable[..., Any], inputs: Inputs, places: Sequence[Placement]
) -> Traced:
    """Traces ``fn(weights, xs, carry, args) -> (outputs, changed, static)``.

    ``inputs`` are abstract. ``changed`` are the arrays that the layer set in itself.
    There, None takes the place of a weight that is unchanged: transforms of Flax
    (``nnx.remat``) set all that a module has, and full weights must not outlive the
    layer.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    check_partial_sums(program.jaxpr, places)
    count = len(jax.tree.leaves(shapes[0]))
    returned = _returned_weights(program.jaxpr, len(jax.tree.leaves(inputs.weights)))
    wanted = [i < count or not same for i, same in enumerate(returned)]
    avals = [x if w else None for x, w in zip(program.out_avals, wanted, strict=True)]
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), avals)
    if not all(wanted):
        program = without_unused(program, wanted)
    args = [*inputs.args, *abstract(list(program.consts))]
    return inputs._replace(args=args), program, outputs


def _returned_weights(jaxpr: core.Jaxpr, number: int) -> list[bool]:
    """Returns which outputs are one of the first inputs, unchanged."""
    computed = 1 << number

    def rule(eqn: Any, entering: list[int]) -> list[int] | None:
        return None if eqn.primitive.name in CALLS else [computed] * len(eqn.outvars)

    bits = [1 << i for i in range(number)]
    bits += [computed] * (len(jaxpr.invars) - number)
    return [0 < bit < computed for bit in dependencies(jaxpr, bits, rule)]


class Layer:
    """A traced layer with the residuals of its backward.

    Attributes:
      inputs: abstract inputs.
      outputs: a pytree of abstract arrays.
      moves: which inputs have gradients.
      consts: constants of user-defined derivative rules, which get no gradients.
      reads: whether the backward needs each weight.
    """

    def __init__(
        self, traced: Traced, trained: Sequence[bool], remat: Any, *, prevent_cse: bool
    ):
        self.inputs, self._program, self.outputs = traced
        if remat != "none" and (eqn := find(self._program.jaxpr.eqns, {"io_callback"})):
            raise UserError(
                f"{line_of(eqn)}: an io_callback in a unit whose backward computes it "
                "again, which JAX refuses; use jax.pure_callback, or remat='none' for "
                "this unit (policy.overrides)"
            )
        fn = checkpoint(self.evaluate, remat, prevent_cse=prevent_cse)

        floats: Inputs = jax.tree.map(is_float, self.inputs)
        self.moves = moves = floats._replace(weights=list(trained))

        def with_residuals(*inputs):
            inputs = Inputs(*inputs)
            fixed = select(inputs, jax.tree.map(lambda m: not m, moves))

            def of_moving(moving):
                outputs = fn(merge(moving, fixed))
                return differentiable(outputs, self.outputs), outputs

            moving = select(inputs, moves)
            _, pullback, outputs = jax.vjp(of_moving, moving, has_aux=True)
            return outputs, pullback

        run, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(*self.inputs)
        self._pullback = jax.tree.structure(shapes[1])
        self.consts = list(run.consts)
        leaves = jax.tree.leaves(self.inputs)
        jaxpr = consts_as_inputs(run, leaves, abstract(self.consts))
        self._sort_residuals(jaxpr, prefix=jax.tree.structure(shapes[0]).num_leaves)
        self._leaves_device = [
            isinstance(remat, Offload)
            and (INPUTS in remat.names or var not in set(jaxpr.invars))
            for var in self._kept
        ]

    def _sort_residuals(self, jaxpr: core.Jaxpr, prefix: int) -> None:
        """Splits residuals into those to keep and those to rebuild in the backward.

        Those that depend on weights alone, on ``args`` alone or on neither are rebuilt,
        and so are inputs other than the carry. All others are kept.
        """
        of_weights, of_args, of_rest = 1, 2, 4
        bits = Inputs(of_weights, of_rest, of_rest, of_args)
        needs = jax.tree.leaves(
            jax.tree.map(lambda b, x: [b] * len(jax.tree.leaves(x)), bits, self.inputs)
        )
        # Arrays that are known now, such as tables, make nothing depend on args.
        traced = [isinstance(x, Tracer) for x in self._program.consts]
        needs[len(needs) - len(traced) :] = [of_args * is_one for is_one in traced]
        needs += [of_args] * len(self.consts)
        needs = dependencies(jaxpr, needs)[prefix:]
        first, carry = (
            len(jax.tree.leaves(x)) for x in (self.inputs[:2], self.inputs.carry)
        )
        free = set(jaxpr.invars) - set(jaxpr.invars[first : first + carry])
        kept: dict[Any, int] = {}
        self._source: list[int | None] = []  # index among the kept, or None
        keep, lost = [], []  # whether the first to be kept of its kind; to be rebuilt
        for var, need in zip(jaxpr.outvars[prefix:], needs, strict=True):
            lost.append(need in (0, of_weights, of_args) or var in free)
            keep.append(not lost[-1] and var not in kept)
            index = None if lost[-1] else kept.setdefault(var, len(kept))
            self._source.append(index)
        self._kept = list(kept)
        self._forward = needed_for(jaxpr, [True] * prefix + keep)
        # The forward has printed and called back already.
        self._rebuild = needed_for(jaxpr, [False] * prefix + lost, effects=False)
        weights, structure = jax.tree.flatten(self.inputs.weights)
        self.reads = jax.tree.unflatten(structure, self._rebuild[1][: len(weights)])

    def evaluate(self, inputs: Inputs) -> Any:
        """Returns the outputs without residuals."""
        leaves, consts = jax.tree.leaves(inputs), self._program.consts
        split = len(self._program.jaxpr.invars)
        # The constants are the last of the args.
        program = core.ClosedJaxpr(
            self._program.jaxpr, leaves[split : split + len(consts)]
        )
        outputs = core.jaxpr_as_fun(program)(*leaves[:split])
        return jax.tree.unflatten(jax.tree.structure(self.outputs), outputs)

    def forward(self, inputs: Inputs, consts: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the outputs, and the residuals to keep for the backward.

        ``consts`` are those of the layer, as inputs of what is differentiated.
        """
        structure = jax.tree.structure(self.outputs)
        leaves = run_used(*self._forward, [*jax.tree.leaves(inputs), *consts])
        outputs, kept = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
        kept = self._move(kept, jax.memory.Space.Host)
        return jax.tree.unflatten(structure, outputs), kept

    def transpose(
        self,
        inputs: Inputs,
        consts: Sequence[Any],
        kept: Sequence[Any],
        cotangents: Any,
    ) -> Inputs:
        """Returns the gradients of the inputs, None for those without one.

        There is None for weights not in ``reads``, and the carry is ignored. ``kept``
        is what ``forward`` returned, ``cotangents`` are from ``differentiable``.
        """
        carry = [None] * len(jax.tree.leaves(self.inputs.carry))
        leaves = jax.tree.leaves(
            inputs._replace(carry=carry), is_leaf=lambda x: x is None
        )
        kept = self._move(kept, jax.memory.Space.Device)
        rebuilt = iter(run_used(*self._rebuild, [*leaves, *consts]))
        residuals = [next(rebuilt) if i is None else kept[i] for i in self._source]
        (grads,) = jax.tree.unflatten(self._pullback, residuals)(cotangents)
        return grads

    def _move(self, kept: Sequence[Any], space: Any) -> list[Any]:
        """Moves offloaded residuals to the memory ``space``."""
        return [
            jax.device_put(x, space) if leaves else x
            for x, leaves in zip(kept, self._leaves_device, strict=True)
        ]


def differentiable(tree: Any, outputs: Any) -> Any:
    """Returns ``tree`` with None where the layer's output is not float."""
    return select(tree, jax.tree.map(is_float, outputs))


def select(tree: Any, wanted: Any) -> Any:
    """Returns ``tree`` with None for what is False in ``wanted``, a prefix of it."""
    return jax.tree.map(lambda w, x: x if w else None, wanted, tree)


def merge(first: Any, second: Any) -> Any:
    """Returns ``first`` with each None replaced by the leaf of ``second``."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, first, second, is_leaf=lambda x: x is None
    )


def abstract(tree: Any, *, layer: bool = False) -> Any:
    """Returns a pytree of arrays as abstract arrays of a step.

    With ``layer``, these are of one layer of stacked arrays (L, ...).
    """
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape[1:] if layer else x.shape, x.dtype, sharding=sharding
        ),
        tree,
    )


def check_names(jaxpr: core.Jaxpr, policy: Policy) -> None:
    """Checks that each name in a remat policy is that of some activation.

    Raises:
      UserError: a policy names an activation that the program does not have.
    """
    remats = list(policy.everywhere("remat").values())
    named = [remat.names for remat in remats if isinstance(remat, Names)]
    wanted = {name for names in named for name in names}
    if any(isinstance(remat, Offload) for remat in remats):
        wanted.discard(INPUTS)
    found = set(names_in(jaxpr)) if wanted else set()
    if unknown := sorted(wanted - found):
        raise UserError(
            f"policy.remat: no activation is named {', '.join(map(repr, unknown))} "
            "(with jax.ad_checkpoint.checkpoint_name); named are: "
            f"{', '.join(sorted(found)) or 'none'}"
        )


def names_in(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the names of a jaxpr's activations, from ``checkpoint_name`` of JAX."""
    for eqn in nested(jaxpr.eqns):
        if eqn.primitive.name == "name":
            yield eqn.params["name"]


def _attention(primitive: Any, *_: Any, **params: Any) -> bool:
    """Keeps flash attention: its output, the softmax's statistics, and its operands.

    Operands are kept as the kernel reads them, instead of the products before them.
    """
    if primitive.name == "name":
        return params["name"] == ATTENTION_OPERANDS
    return primitive.name.startswith("dot_product_attention_fwd")  # cuDNN's


def _products(primitive: Any, *args: Any, **params: Any) -> bool:
    """Keeps products with weights, and flash attention, which is two products."""
    keeps = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    kept = _attention(primitive, *args, **params)
    kept |= primitive.name == "block_scaled_dot"
    return kept or (primitive.name != "name" and keeps(primitive, *args, **params))


def checkpoint(fn: Callable, remat: Any, *, prevent_cse: bool) -> Callable:
    """Applies the remat policy ``remat`` to a layer function."""
    if remat == "none":
        return fn
    policies, policy = jax.checkpoint_policies, remat
    if isinstance(remat, Names):
        policy = policies.save_only_these_names(*remat.names)
    elif isinstance(remat, str):
        keeps = {"attention": _attention, "dots": _products}
        policy = keeps[remat] if remat != "full" else policies.nothing_saveable
    return jax.checkpoint(fn, policy=policy, prevent_cse=prevent_cse)

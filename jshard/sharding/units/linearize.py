"""Traces a layer once, and splits it into outputs, residuals and transpose.

Some of the residuals that the remat policy would keep depend on the weights alone: the
gathered weights, their casts, their transposes, products of two weights. These are
*not* kept. The backward rebuilds them from weights that it gathers again. A dataflow
analysis of the jaxpr finds them, so this holds for every policy, including
``everything_saveable``. A JAX policy sees only one primitive at a time, and by itself
would keep the full weights of every layer.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jshard.sharding.axes.partial_sums import check_partial_sums
from jshard.sharding.collectives.gather import gather
from jshard.sharding.layout.placement import Placement
from jshard.sharding.settings.policy import INPUTS, Offload, UnitPolicy
from jshard.sharding.settings.precision import is_float
from jshard.sharding.settings.remat import checkpoint
from jshard.system.compat import jaxprs
from jshard.system.compat.programs import lines
from jshard.system.compat.programs.dataflow import dependencies
from jshard.system.errors import UserError


class Inputs(NamedTuple):
    """The inputs of a layer, as pytrees of arrays.

    Also those of all layers of a Stack, with weights and xs of shape (L, ...).
    """

    weights: Any  # full weights; of a Stack, this device's shards
    xs: Any  # the layer's other arrays: state, and shards of units inside it
    carry: Any  # what one layer passes to the next; for a Unit, the call's arguments
    args: Any  # what all layers share


class Gradients(NamedTuple):
    """Gradients of ``Inputs``, or of a Stack's so far; None for what has none."""

    weights: Any
    xs: Any
    carry: Any
    args: Any


class TracedLayer(NamedTuple):
    """A layer's function as a program."""

    inputs: Inputs  # abstract; args end with those for the program's constants
    program: core.ClosedJaxpr  # its constants, closed over, get gradients
    outputs: Any  # abstract


def trace_layer(
    fn: Callable[..., Any],
    inputs: Inputs,
    places: Sequence[Placement],
    *,
    stacked: bool = False,
) -> TracedLayer:
    """Traces ``fn(weights, xs, carry, args) -> (outputs, changed, static)``.

    ``inputs`` has this device's shards in place of weights; with ``stacked``, these and
    ``xs`` are those of all layers. ``changed`` are the arrays that the layer set in
    itself. There, None takes the place of a weight that is unchanged: transforms of
    Flax (``nnx.remat``) set all that a module has, and full weights must not outlive
    the layer.
    """
    shards, xs = abstract((list(inputs.weights), list(inputs.xs)), layer=stacked)
    weights = jax.eval_shape(lambda shards: gather(shards, list(places)), shards)
    inputs = abstract(Inputs(weights, xs, inputs.carry, list(inputs.args)))
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*inputs)
    if lin := jaxprs.find(eqns := program.jaxpr.eqns, {"custom_lin"}):
        refuse_forward_mode(lines.line_of(lin, eqns))
    check_partial_sums(program.jaxpr, places)
    count = len(jax.tree.leaves(shapes[0]))
    returned = _returned_weights(program.jaxpr, len(jax.tree.leaves(inputs.weights)))
    wanted = [i < count or not same for i, same in enumerate(returned)]
    avals = [x if w else None for x, w in zip(program.out_avals, wanted, strict=True)]
    outputs = jax.tree.unflatten(jax.tree.structure(shapes), avals)
    if not all(wanted):
        program = jaxprs.without_unused(program, wanted)
    args = [*inputs.args, *abstract(list(program.consts))]
    return TracedLayer(inputs._replace(args=args), program, outputs)


def refuse_forward_mode(line: str) -> NoReturn:
    """Raises UserError for a unit that is differentiated in forward mode."""
    raise UserError(
        f"{line}: forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of "
        "a jshard unit, or another function with a custom_vjp; use jax.vjp or "
        "jax.grad, which nest, or call what jshard.gathered(unit) returns"
    )


def _returned_weights(jaxpr: core.Jaxpr, number: int) -> list[bool]:
    """Returns which outputs are one of the first inputs, unchanged."""
    computed = 1 << number

    def rule(eqn: Any, _: list[int]) -> list[int] | None:
        if eqn.primitive.name in jaxprs.CALLS:
            return None
        return [computed] * len(eqn.outvars)

    bits = [1 << min(i, number) for i in range(len(jaxpr.invars))]
    return [0 < bit < computed for bit in dependencies(jaxpr, bits, rule)]


class Layer:
    """A traced layer with the residuals of its backward.

    Attributes:
      outputs: a pytree of abstract arrays.
      places: the placements of its weights.
      reshard: ``reshard_after_forward``.
      straight: whether it runs outside of loops.
      differentiable: which inputs have gradients, True or False for each.
      consts: constants of user-defined derivative rules, which get no gradients.
      needed_in_backward: which weights the backward computes with.
    """

    def __init__(
        self,
        traced: TracedLayer,
        places: Sequence[Placement],
        policy: UnitPolicy,
        *,
        straight: bool,
    ):
        self._inputs, self._program, self.outputs = traced
        self.places, self.reshard = places, policy.reshard_after_forward
        self.straight = straight
        eqns = self._program.jaxpr.eqns
        eqn = jaxprs.find(eqns, {"io_callback"})
        if eqn is not None and policy.remat != "none":
            raise UserError(
                f"{lines.line_of(eqn, eqns)}: an io_callback in a unit whose backward "
                "computes it again, which JAX refuses; use jax.pure_callback, or "
                "remat='none' for this unit (policy.overrides)"
            )
        fn = checkpoint(self.evaluate, policy.remat, prevent_cse=straight)

        _, *others = jax.tree.map(is_float, self._inputs)
        trained = [place.gradient.trainable for place in places]
        self.differentiable = Gradients(trained, *others)
        wanted = tuple(self.differentiable)

        def with_residuals(*inputs):
            fixed = select(inputs, jax.tree.map(lambda yes: not yes, wanted))

            def of_wanted(primals):
                outputs = fn(Inputs(*merge(primals, fixed)))
                return floats_of(outputs, self.outputs), outputs

            primals = select(inputs, wanted)
            _, pullback, outputs = jax.vjp(of_wanted, primals, has_aux=True)
            return outputs, pullback

        run, shapes = jax.make_jaxpr(with_residuals, return_shape=True)(*self._inputs)
        self._pullback = jax.tree.structure(shapes[1])
        self.consts = list(run.consts)
        leaves = jax.tree.leaves(self._inputs)
        jaxpr = jaxprs.consts_as_inputs(run, leaves, abstract(self.consts))
        if jaxprs.find(jaxpr.eqns, jaxprs.KERNELS):  # which calls would hide
            inputs = [*leaves, *abstract(self.consts)]
            jaxpr = jaxprs.flat_jaxpr(core.ClosedJaxpr(jaxpr, ()), inputs).jaxpr
        self._sort_residuals(jaxpr, prefix=jax.tree.structure(shapes[0]).num_leaves)
        offload = policy.remat if isinstance(policy.remat, Offload) else None
        inputs = () if offload and INPUTS in offload.names else jaxpr.invars
        self._leaves_device = [bool(offload) and v not in inputs for v in self._kept]

    def _sort_residuals(self, jaxpr: core.Jaxpr, prefix: int) -> None:
        """Splits residuals into those to keep and those to rebuild in the backward.

        Those that depend on weights alone, on ``args`` alone or on neither are rebuilt,
        and so are inputs other than the carry. All others are kept.
        """
        of_weights, of_args, of_rest = 1, 2, 4
        bits = of_weights, of_rest, of_rest, of_args
        needs = jax.tree.leaves(jax.tree.broadcast(bits, tuple(self._inputs)))
        # Arrays that are known now, such as tables, make nothing depend on args.
        traced = [isinstance(x, Tracer) for x in self._program.consts]
        needs[len(needs) - len(traced) :] = [of_args * is_one for is_one in traced]
        needs += [of_args] * len(self.consts)
        needs = dependencies(jaxpr, needs)[prefix:]
        first, carry = (
            len(jax.tree.leaves(x)) for x in (self._inputs[:2], self._inputs.carry)
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
        self._forward = jaxprs.needed_for(jaxpr, [True] * prefix + keep)
        # The forward has printed and called back already.
        self._rebuild = jaxprs.needed_for(jaxpr, [False] * prefix + lost, effects=False)
        weights, structure = jax.tree.flatten(self._inputs.weights)
        needed = self._rebuild[1][: len(weights)]
        self.needed_in_backward = jax.tree.unflatten(structure, needed)

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

    def forward(self, inputs: Inputs) -> tuple[Any, list[Any]]:
        """Returns the outputs, and the residuals to keep for the backward."""
        structure = jax.tree.structure(self.outputs)
        leaves = jaxprs.run_used(
            *self._forward, [*jax.tree.leaves(inputs), *self.consts]
        )
        outputs, kept = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
        kept = self._move(kept, jax.memory.Space.Host)
        return jax.tree.unflatten(structure, outputs), kept

    def transpose(
        self, inputs: Inputs, kept: Sequence[Any], cotangents: Any
    ) -> Gradients:
        """Returns the gradients of the inputs.

        There is None for weights that are not ``needed_in_backward``, and the carry is
        ignored. ``kept`` is what ``forward`` returned, ``cotangents`` are from
        ``floats_of``.
        """
        carry = [None] * len(jax.tree.leaves(self._inputs.carry))
        leaves = jax.tree.leaves(
            inputs._replace(carry=carry), is_leaf=lambda x: x is None
        )
        kept = self._move(kept, jax.memory.Space.Device)
        rebuilt = iter(jaxprs.run_used(*self._rebuild, [*leaves, *self.consts]))
        residuals = [next(rebuilt) if i is None else kept[i] for i in self._source]
        (grads,) = jax.tree.unflatten(self._pullback, residuals)(cotangents)
        return Gradients(*grads)

    def no_gradients(self, stacked: Inputs, carry_ct: Any) -> Gradients:
        """Returns zeros for the inputs of all layers, but that of the carry."""
        inputs, wanted = stacked._replace(carry=None), self.differentiable
        primals = select(tuple(inputs), tuple(wanted._replace(carry=None)))
        zeros = jax.tree.map(jnp.zeros_like, primals)
        return Gradients(*zeros)._replace(carry=carry_ct)

    def _move(self, kept: Sequence[Any], space: Any) -> list[Any]:
        """Moves offloaded residuals to the memory ``space``."""
        return [
            jax.device_put(x, space) if leaves else x
            for x, leaves in zip(kept, self._leaves_device, strict=True)
        ]


def _with_consts(layer: Layer, consts: Iterable[Any]) -> Layer:
    layer = copy.copy(layer)
    layer.consts = list(consts)
    return layer


# As a pytree it has its constants as leaves, which a ``custom_vjp`` must be given.
jax.tree_util.register_pytree_node(
    Layer, lambda layer: (layer.consts, layer), _with_consts
)


def floats_of(tree: Any, outputs: Any) -> Any:
    """Returns ``tree`` with None where the output of a layer is not float."""
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

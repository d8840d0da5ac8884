"""nnx.Optimizer: what it keeps becomes part of a TrainState, and back.

Flax puts each array of an optax state into a Variable. Paths and exact shapes are those
of a TrainState's ``opt_state``, which is padded and sharded besides.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jshard.sharding.layout.padding import exact_types
from jshard.sharding.layout.values.transfer import as_read, put
from jshard.sharding.layout.variables import is_variable
from jshard.sharding.settings.state import TrainState, check_kept
from jshard.system.errors import UserError


def transformation(optimizer: Any) -> Any:
    """Returns the optax transformation of an nnx.Optimizer; all else as it is.

    Raises:
      UserError: its class has an update of its own.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        return optimizer
    flax = (nnx.Optimizer.update, nnx.ModelAndOptimizer.update)
    if type(optimizer).update not in flax:
        raise UserError(
            f"optimizer is an nnx.Optimizer of class {type(optimizer).__name__}, whose "
            "own update a step would not call; move what it does into the loss or the "
            "optax transformation, and pass a plain one of the same state: plain = "
            "nnx.Optimizer(model, optimizer.tx, wrt=optimizer.wrt); plain.step, "
            "plain.opt_state = optimizer.step, optimizer.opt_state"
        )
    return optimizer.tx


def taken_over(optimizer: Any, values: nnx.State, abstract: TrainState) -> TrainState:
    """Returns an abstract state with the step and the arrays of an nnx.Optimizer.

    Args:
      optimizer: an nnx.Optimizer. With anything else the state stays as it is.
      values: all variables of the model.
      abstract: the state of ``values``, as ShapeDtypeStructs with shardings.

    Raises:
      UserError: the optimizer trains other parameters, or was made for another model.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        return abstract
    kept = (optimizer.step.get_value(), optimizer.opt_state)
    check_kept(kept)
    _check_same_parameters(
        nnx.filter_state(values, optimizer.wrt),
        abstract.params,
        "the wrt of the nnx.Optimizer",
        "the wrt of fsdp.from_model",
        "pass wrt=optimizer.wrt",
    )
    arrays = _arrays_like(
        optimizer.opt_state,
        abstract.opt_state,
        "opt_state of the nnx.Optimizer",
        "make it of the model as it is now",
    )
    likes, structure = jax.tree.flatten(abstract.opt_state)
    step = put(np.asarray(kept[0]), abstract.step)
    opt_state = jax.tree.unflatten(structure, map(put, arrays, likes))
    return dataclasses.replace(abstract, step=step, opt_state=opt_state)


def given_back(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    wrt: Any,
    state: TrainState,
    mesh: Any,
) -> nnx.Optimizer:
    """Returns the nnx.Optimizer of a state and its ``model``, with exact shapes.

    Raises:
      UserError: the state was made with another ``tx`` or ``wrt``, or is abstract.
    """
    if isinstance(state.step, jax.ShapeDtypeStruct):
        raise UserError(
            "the state has shapes and no arrays; fsdp.to_optimizer takes one of "
            "fsdp.init or fsdp.from_model"
        )
    _check_same_parameters(
        nnx.state(model, wrt),
        state.params,
        "wrt",
        "the wrt that the state was made with",
        "pass that",
    )
    optimizer = nnx.eval_shape(lambda model: nnx.Optimizer(model, tx, wrt=wrt), model)
    arrays = iter(
        _arrays_like(
            as_read(state.opt_state, mesh),
            optimizer.opt_state,
            "state.opt_state",
            "give the optimizer that the state was made with",
        )
    )
    for variable in jax.tree.leaves(optimizer.opt_state, is_leaf=is_variable):
        structure = jax.tree.structure(variable.get_raw_value())
        some = [next(arrays) for _ in range(structure.num_leaves)]
        variable.set_raw_value(jax.tree.unflatten(structure, some))
    optimizer.step.set_raw_value(state.step.astype(jnp.uint32))
    return optimizer


def _check_same_parameters(
    found: nnx.State, wanted: nnx.State, one: str, other: str, instead: str
) -> None:
    """Raises UserError unless two filters select the same variables, by path."""
    paths = [dict(nnx.to_flat_state(x)).keys() for x in (found, wanted)]
    for path in sorted(paths[0] ^ paths[1], key=str):
        selects, leaves_out = (one, other) if path in paths[0] else (other, one)
        raise UserError(
            f"{selects} selects {'.'.join(map(str, path))!r}, which {leaves_out} does "
            f"not; {instead}"
        )


def _arrays_like(found: Any, wanted: Any, what: str, instead: str) -> list[Any]:
    """Returns the arrays of an optax state in the order of those of another.

    Types of variables may differ; ``wanted`` may be padded.

    Raises:
      UserError: the states differ in paths, shapes or kinds of numbers.
    """
    arrays, found, wanted = [], _by_path(found), _by_path(exact_types(wanted))
    for name in sorted(wanted.keys() - found.keys()):
        raise UserError(f"{what} has no {name!r}, which its tx keeps; {instead}")
    for name in sorted(found.keys() - wanted.keys()):
        raise UserError(f"{what} has {name!r}, which its tx does not keep; {instead}")
    for name, types in wanted.items():
        kinds, needed = (list(map(_kind, x)) for x in (found[name], types))
        if kinds != needed:
            raise UserError(
                f"{what} has {', '.join(kinds)} at {name!r}, where its tx keeps "
                f"{', '.join(needed)}; {instead}"
            )
        arrays += found[name]
    return arrays


def _kind(x: Any) -> str:
    """Describes a shape and a kind of numbers; floats are cast, like parameters."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return f"{'float' if floating else x.dtype}{list(x.shape)}"


def _by_path(tree: Any) -> dict[str, list[Any]]:
    """Returns the arrays of each variable, or other leaf, of an optax state."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): jax.tree.leaves(leaf) for path, leaf in leaves}

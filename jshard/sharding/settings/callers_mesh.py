"""The mesh of the caller (``jax.set_mesh``), on which nothing that jshard does depends.

JAX refuses an array of one mesh within another whose axes are Explicit. So what users
call runs outside of the caller's mesh (``own_mesh``), takes arrays of any mesh of the
same devices (``taken``), and gives its results back as arrays of the caller's
(``given_back``). Inside, all axes are Auto.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jshard.system.errors import UserError, some_of

Given = ParamSpec("Given")
Result = TypeVar("Result")

# What JAX says of an array of Explicit axes that nobody passed.
_NOT_PASSED = (
    "Closing over inputs to shard_map",
    "Mesh for all inputs should be equal",
    "should match the aval mesh",
    "not equal to the size of the mesh",
)


@contextlib.contextmanager
def own_mesh(mesh: Any = None) -> Iterator[Mesh | None]:
    """Takes a mesh that the caller has set away, unless it is ``mesh``.

    Yields it, or None if it stays, there is none, or a trace is under way.

    Raises:
      UserError: what is inside uses an array of Explicit axes that was not passed.
    """
    outside: Any = contextlib.nullcontext()
    callers, given = jax.sharding.get_abstract_mesh(), None
    if not callers.empty and not callers.manual_axes:  # manual: called within a step
        try:
            given = jax.sharding.get_mesh()
        except ValueError:  # within a trace, as of jax.jit
            outside = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
        else:
            given = None if given == mesh else given
            outside = outside if given is None else jax.set_mesh(None)
    with outside:
        try:
            yield given
        except (ValueError, NotImplementedError) as error:
            if not any(text in str(error) for text in _NOT_PASSED):
                raise
            raise UserError(
                "the loss, the optimizer or the model uses an array that was made on a "
                "mesh of Explicit axes (jax.set_mesh), and is neither in the state nor "
                "in the batch; put it there, or make it with NumPy (JAX: "
                f"{str(error).partition('. ')[0]})"
            ) from error


def in_own_mesh(
    method: Callable[Concatenate[Any, Given], Result],
) -> Callable[Concatenate[Any, Given], Result]:
    """Runs a method of an object with a ``mesh`` within ``own_mesh`` of that."""

    @functools.wraps(method)
    def run(self: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with own_mesh(self.mesh):
            return method(self, *args, **kwargs)

    return run


def of_auto_axes(mesh: Any) -> Any:
    """Returns a mesh, abstract or not, with Auto axes in place of Explicit ones."""
    if mesh.are_all_axes_auto:
        return mesh
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def all_on(arrays: Iterable[Any], mesh: Any) -> bool:
    """Returns whether all arrays are on a mesh, so that ``taken`` would change none."""
    places = (getattr(x, "sharding", None) for x in arrays)
    return all(getattr(place, "mesh", None) is mesh for place in places)


def taken(tree: Any, mesh: Any, what: str) -> Any:
    """Returns a tree with the arrays of other meshes on Auto axes, split as they were.

    Nothing is copied if the meshes have their devices in one order. With ``mesh`` None,
    devices may be any, and stay.

    Args:
      tree: any tree of arrays, abstract or not.
      mesh: whose devices the arrays must be on, in whose order.
      what: the tree's name, for errors.

    Raises:
      UserError: an array is on other devices, or of other Explicit axes in a trace.
    """
    named = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")

    def one(path: tuple, x: Any) -> Any:
        place = getattr(x, "sharding", None)
        if mesh is not None and getattr(place, "mesh", None) is mesh:
            return x
        if isinstance(x, Tracer):
            typed = jax.typeof(x).sharding.mesh
            if mesh and typed.explicit_axes and typed.shape_tuple != mesh.shape_tuple:
                raise UserError(
                    f"{what}: {named(path)!r} is of Explicit axes {typed.axis_names} "
                    "within jax.jit or eval_shape; call the step outside, which is "
                    "jitted already"
                )
            return x
        concrete = isinstance(x, jax.Array)
        if concrete and mesh and x.committed and x.sharding.device_set != devices:
            raise UserError(
                f"{what}: {named(path)!r} is on {_text(x.sharding.device_set)}, but "
                f"FSDP's mesh has {_text(devices)}; put a batch there with "
                "fsdp.shard_batch, and a state with fsdp.put"
            )
        if not isinstance(place, NamedSharding):
            return x
        auto = of_auto_axes(place.mesh)
        if concrete and mesh:
            grid = mesh.devices.reshape(auto.devices.shape)
            auto = Mesh(grid, auto.axis_names, auto.axis_types)
        if auto == place.mesh:
            return x
        place = NamedSharding(auto, place.spec, memory_kind=place.memory_kind)
        if concrete:
            return jax.device_put(x, place)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    devices = {*mesh.devices.flat} if isinstance(mesh, Mesh) else set()
    return jax.tree_util.tree_map_with_path(one, tree)


def given_back(tree: Any, callers: Mesh | None, *, whole: bool = False) -> Any:
    """Returns results as arrays of the caller's mesh, if it has Explicit axes.

    Those of examples are split over all its devices again.

    Args:
      tree: results of what ran within ``own_mesh``.
      callers: what that yielded.
      whole: whether each device gets all of every array.
    """
    if callers is None or callers.are_all_axes_auto:
        return tree

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return x
        own, spec = x.sharding, PartitionSpec()
        if own.device_set != {*callers.devices.flat}:
            return x  # nothing of both can be computed
        if not whole and isinstance(own, NamedSharding) and own.spec:
            if own.mesh.shape_tuple == callers.shape_tuple:
                spec = own.spec
            elif x.shape[0] % callers.size == 0:
                spec = PartitionSpec(callers.axis_names)
        return jax.device_put(x, NamedSharding(callers, spec))

    return jax.tree.map(one, tree)


def check_devices(tree: Any, callers: Mesh | None) -> None:
    """Raises UserError for arrays that the caller could not compute with."""
    devices = {*callers.devices.flat} if callers else None
    for x in jax.tree.leaves(tree) if devices else ():
        if isinstance(x, jax.Array) and x.sharding.device_set != devices:
            raise UserError(
                f"the state is on {_text(x.sharding.device_set)}, but jax.set_mesh has "
                f"{_text(devices)}, where JAX would refuse calls of the model; use it "
                "outside, or within jax.set_mesh(None), or in a step"
            )


def _text(devices: Any) -> str:
    return some_of(sorted(map(str, devices)), limit=3)

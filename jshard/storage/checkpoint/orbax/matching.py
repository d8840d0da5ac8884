"""Which arrays of Orbax's checkpoint are which of a state, and reading them."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jshard.sharding.layout.values.random_streams import is_random
from jshard.sharding.layout.variables import array_keys
from jshard.sharding.settings.state import TrainState
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.orbax.folder import Keys, OrbaxCheckpoint
from jshard.storage.checkpoint.orbax.tree import Part, Tree, differences, dotted
from jshard.storage.checkpoint.stored_arrays import open_specs, read_specs
from jshard.system.errors import UserError, some_of

_LINEN = "params"  # Linen's collection, which its tree of parameters may be below
_OPT_STATE = "opt_state"  # of Flax's TrainState and nnx.Optimizer
_STEP = "step"  # of both, beside it


@dataclasses.dataclass(frozen=True)
class OrbaxMatch:
    """What is read from a checkpoint of Orbax's, checked, before any of it is.

    Attributes:
      checkpoint: The checkpoint.
      names: The paths of its arrays, by the names of the state's.
      step: The number of steps that it was saved after; None if nothing there says it,
        or the optimizer starts anew.
      said: What was found where, for the user.
      left: What else the checkpoint holds, which is not read.
    """

    checkpoint: OrbaxCheckpoint
    names: Mapping[str, Keys]
    step: int | None
    said: str
    left: str

    @property
    def note(self) -> str:
        """What the checkpoint was taken for, on one line."""
        left = f"; not read: {self.left}" * bool(self.left)
        return f"{self.checkpoint}: {self.said}{left}"

    def load(
        self, state: TrainState, only: str | tuple[str, ...] = ""
    ) -> dict[str, jax.Array]:
        """Reads arrays, each device its shards; returns them by name.

        Args:
          state: Concrete or abstract. Concrete arrays are deleted before theirs are
            read.
          only: How the names of the arrays begin.
        """
        wanted = {
            name: x
            for name, x in metadata.arrays_by_name(state).items()
            if name in self.names and name.startswith(only)
        }
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in wanted.items()
        }
        for x in wanted.values():
            if isinstance(x, jax.Array):
                x.delete()
        return read_specs(
            self.checkpoint.path,
            {name: self.checkpoint.arrays[self.names[name]] for name in wanted},
            abstract,
        )


def match(
    checkpoint: OrbaxCheckpoint,
    state: TrainState,
    *,
    optimizer: bool,
    params_at: str | None = None,
    optimizer_at: str | None = None,
) -> OrbaxMatch:
    """Finds the arrays of a state in a checkpoint, and checks shapes and dtypes.

    Parameters are where the paths of all are found, and so is the optimizer's state, of
    which nothing may be left over. Other model state is beside the parameters, or where
    all of it is. Random streams are read with the optimizer's state, if they are there.
    Adapters (``nnx.LoRAParam``) that the checkpoint lacks are left out.

    Args:
      checkpoint: What ``open_orbax`` returns.
      state: Concrete or abstract.
      optimizer: Whether to find the optimizer's state.
      params_at: Where the parameters are, if several places fit: keys with dots.
      optimizer_at: The same, of the optimizer's state.

    Raises:
      UserError: No place fits, or several do.
    """
    tree, parts = Tree(checkpoint.arrays), _Parts(state)
    streams = tree.streams()
    optimizers = {
        place: part
        for part in parts.optimizer
        for place in tree.places(part)
        if not differences(tree, place, part, set())
    }
    moments = {path for place in optimizers for path in tree.below(place)}

    candidates = [x for x in tree.places(parts.params) if not _within(x, optimizers)]
    what = "the parameters"
    params = _one_place(checkpoint, what, candidates, "params_at", params_at)
    if params is None:
        params = _closest(tree, parts.params, optimizers)
    found = tree.at(params, {**parts.params, **parts.adapters})
    found |= _beside(tree, params, parts.model_state)
    fine = {*found.values()} | streams | moments
    _check_model(checkpoint, tree, params, parts, found, fine)
    said, place = [f"parameters at {dotted(params)}"], None
    if optimizer:
        what, fitting = "the optimizer's state", [*optimizers]
        place = _one_place(checkpoint, what, fitting, "optimizer_at", optimizer_at)
        if place is None and parts.optimizer:
            raise _other_optimizer(checkpoint, tree, parts.optimizer, fine)
        if place is not None:
            found |= tree.at(place, optimizers[place])
            said.append(f"its optimizer's state at {dotted(place)}")
        found |= (random := _beside(tree, params, parts.random))
        if parts.random and not random:
            said.append("random streams start anew")
    _check_types(checkpoint, state, found)

    counter, step = _step_path(tree, place, params), None
    if optimizer:
        step = checkpoint.step if counter is None else _read_step(checkpoint, counter)
        said += [f"step {step}"] if step is not None else []
    read = {*found.values()} | ({counter} if counter else set())
    skipped = streams if optimizer else streams | moments
    left = [path for path in tree.paths if path not in read | skipped]
    groups = some_of([*tree.groups(left, read)])
    if optimizer and not streams <= read:
        said.append("other random streams are not read")
    return OrbaxMatch(checkpoint, found, step, ", ".join(said), groups)


def _check_model(
    checkpoint: OrbaxCheckpoint,
    tree: Tree,
    place: Keys,
    parts: "_Parts",
    found: Mapping[str, Keys],
    fine: set[Keys],
) -> None:
    """Raises UserError if parameters or statistics are missing, or there are others."""
    problem = differences(tree, place, parts.params, fine)
    statistics = sorted(x for x, name in parts.model_state.items() if name not in found)
    if statistics:
        lacks = f"it lacks {some_of([*map(dotted, statistics)])}"
        problem = f"{problem}; {lacks}" if problem else lacks
    if problem:
        raise UserError(
            f"{checkpoint} is of another model: compared with {dotted(place)} there, "
            f"{problem}"
        )


class _Parts:
    """The parts of a state: names by paths, as a checkpoint has them below a place."""

    def __init__(self, state: TrainState):
        """Divides a state."""
        variables = metadata.variables_by_name(state)
        kinds: dict[str, dict[Keys, str]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            kind, *keys = array_keys(path)
            if np.prod(np.shape(leaf)):
                name = ".".join((kind, *keys))
                kinds.setdefault(kind, {})[tuple(keys)] = name
        whole = kinds.get("params", {}) | kinds.get("frozen", {})
        above = _above_linen(whole)
        below = {path[len(above) :]: name for path, name in whole.items()}
        is_adapter = lambda name: isinstance(variables.get(name), nnx.LoRAParam)
        self.adapters: Part = {p: name for p, name in below.items() if is_adapter(name)}
        self.params: Part = {p: n for p, n in below.items() if p not in self.adapters}
        others = kinds.get("model_state", {})
        random = {
            p for p, n in others.items() if n in variables and is_random(variables[n])
        }
        self.random: Part = {p: n for p, n in others.items() if p in random}
        self.model_state: Part = {p: n for p, n in others.items() if p not in random}
        opt_state = kinds.get("opt_state", {})
        # Linen's optimizers are made of its tree, or of {"params": tree}.
        ways = {len(above), max(len(above) - 1, 0)}
        self.optimizer: list[Part] = [
            {_without(path, whole, n): name for path, name in opt_state.items()}
            for n in sorted(ways)
            if opt_state
        ]


def _above_linen(paths: Collection[Keys]) -> Keys:
    """Returns what all paths begin with, up to Linen's "params"; () if they do not."""
    first = min(paths, default=())
    for i, key in enumerate(first[:-1], 1):
        if key == _LINEN and all(path[:i] == first[:i] for path in paths):
            return first[:i]
    return ()


def _without(path: Keys, params: Collection[Keys], n: int) -> Keys:
    """Returns the path of what follows a parameter, without that one's first keys."""
    for i in range(len(path)):
        if path[i:] in params:
            return path[:i] + path[i + n :]
    return path


def _within(place: Keys, optimizers: Iterable[Keys]) -> bool:
    """Returns whether a place is in an optimizer's state, as moments are."""
    inside = any(place[: len(above)] == above for above in optimizers)
    return inside or _OPT_STATE in place


def _one_place(
    checkpoint: OrbaxCheckpoint,
    what: str,
    fitting: list[Keys],
    argument: str,
    given: str | None,
) -> Keys | None:
    """Returns the place that is meant; None if there is none."""
    if given is not None:
        fitting = [place for place in fitting if ".".join(place) == given]
        if not fitting:
            raise UserError(
                f"{checkpoint}: {argument}={given!r} is not where {what} can be"
            )
    if len(fitting) > 1:
        raise UserError(
            f"{checkpoint}: {len(fitting)} places fit {what}, "
            f"{some_of([*map(dotted, fitting)])}: give one to jshard.restore_orbax as "
            f"{argument}='...'"
        )
    return fitting[0] if fitting else None


def _closest(tree: Tree, part: Part, optimizers: Iterable[Keys]) -> Keys:
    """Returns the place that holds most of a part, for a message."""
    counts = tree.counts(part)
    places = [x for x in counts if not _within(x, optimizers)]
    return max(places, key=lambda x: (counts[x], -len(x), x), default=())


def _beside(tree: Tree, params: Keys, part: Part) -> dict[str, Keys]:
    """Returns where a part is: with the parameters, or at the only place; or {}."""
    for places in ([params], tree.places(part)):
        if len(places) == 1 and len(found := tree.at(places[0], part)) == len(part):
            return found
    return {}


def _other_optimizer(
    checkpoint: OrbaxCheckpoint, tree: Tree, ways: list[Part], fine: set[Keys]
) -> UserError:
    """Returns what to raise where no place has the state of the optimizer."""

    def closest(part: Part) -> tuple[int, Keys]:
        counts = tree.counts(part)
        most = max(counts, key=lambda x: (counts[x], -len(x), x), default=())
        return counts[most], most

    (number, place), part = max(
        ((closest(part), part) for part in ways), key=lambda x: x[0]
    )
    if not number:
        return UserError(
            f"{checkpoint} has no state of this optimizer: "
            f"{some_of(sorted(map(dotted, part)))} are nowhere; to start it anew leave "
            "out checkpoint.restore_optimizer (jshard.restore_orbax: "
            "restore_optimizer=False)"
        )
    return UserError(
        f"{checkpoint} is of another optimizer: compared with {dotted(place)} there, "
        f"{differences(tree, place, part, fine)}"
    )


def _step_path(tree: Tree, optimizer: Keys | None, params: Keys) -> Keys | None:
    """Returns where the number of steps is: beside the optimizer's state, or alone."""
    if optimizer and (path := tree.get((*optimizer[:-1], _STEP))) is not None:
        return path
    below = {*tree.below(params)}
    found = tree.named(_STEP) - below
    return found.pop() if len(found) == 1 else None


def _read_step(checkpoint: OrbaxCheckpoint, path: Keys) -> int:
    name = dotted(path)
    store = open_specs(checkpoint.path, {name: checkpoint.arrays[path]})[name]
    if store.rank == 0 and np.issubdtype(store.dtype.numpy_dtype, np.integer):
        step = int(store.read().result())
        if 0 <= step < 2**31:
            return step
    raise UserError(f"{checkpoint}: {name} is not a number of steps")


def _check_types(
    checkpoint: OrbaxCheckpoint, state: TrainState, found: Mapping[str, Keys]
) -> None:
    """Compares shapes and dtypes; warns about conversions."""
    exact = metadata.exact_by_name(state)
    wanted = {name: _without_key(exact[name]) for name in found}
    specs = {name: checkpoint.arrays[path] for name, path in found.items()}
    stored = {
        name: {"shape": list(x.shape), "dtype": x.dtype.name}
        for name, x in open_specs(checkpoint.path, specs).items()
    }
    metadata.check_wanted(checkpoint.path, wanted, stored)


def _without_key(x: Any) -> Any:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.eval_shape(jax.random.key_data, x) if is_key else x

"""Policy: all knobs of the sharding in one place."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from jshard.errors import UserError
from jshard.precision import Precision

POLICIES = ("full", "dots", "none")


@dataclasses.dataclass(frozen=True, init=False)
class Names:
    """Remat policy: keep only activations named with ``checkpoint_name``."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        if not names or not all(isinstance(name, str) for name in names):
            raise UserError(
                f"jshard.{type(self).__name__}{names!r}: give names of activations, "
                f"like jshard.{type(self).__name__}('attended', 'hidden')"
            )
        object.__setattr__(self, "names", names)


class Offload(Names):
    """Remat policy: activations named with ``checkpoint_name`` wait in host memory.

    They leave for pinned host memory in the forward and come back for the backward; a
    layer's input stays on the device, and all else is recomputed.
    """


def check_remat(remat: Any) -> None:
    """Raises UserError unless ``remat`` is a policy this version knows."""
    policy = callable(remat) and not isinstance(remat, type)
    if remat in POLICIES or isinstance(remat, Names) or policy:
        return
    raise UserError(
        f"policy.remat: {remat!r} is not one of {', '.join(POLICIES)}, "
        "jshard.Names(...), jshard.Offload(...) or a jax.checkpoint policy"
    )


# False keeps whole weights for the backward, True none, a number a part of them each.
Reshard = bool | int


@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How one unit (a Unit, or the layers of a Stack) treats its weights.

    Attributes:
      remat: what the backward keeps; see ``Policy.remat``.
      reshard_after_forward: True drops gathered weights after the forward and gathers
        them again for the backward; False keeps them; a number keeps them sharded
        over groups of so many devices, which the backward gathers from.
      first_k: to how many layers of a Stack ``remat`` applies; the others keep all
        that their backward reads. None is all layers.
      keep_last: how many of a Stack's last layers keep their gathered weights.
      prefetch: whether a Stack's layer runs between the gather of the next one's
        weights and the scatter of the last one's gradients. None is on GPUs, where
        they run at the same time.
    """

    remat: Any = "full"
    reshard_after_forward: Reshard = True
    first_k: int | None = None
    keep_last: int = 0
    prefetch: bool | None = None


_OFFLOADS = (None, "optimizer", "all")
OF_UNITS = tuple(field.name for field in dataclasses.fields(UnitPolicy))
_OF_STACKS = {"first_k", "keep_last", "prefetch"}
_OVERRIDABLE = (*OF_UNITS, "precision")


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a model is sharded, what is kept, and in which dtypes.

    Attributes:
      remat: what the backward of each Stack layer and Unit keeps of its forward:
        "full" recomputes everything, "dots" keeps products of activations with
        weights, "none" keeps all activations, ``Names(...)`` keeps those named with
        ``jax.ad_checkpoint.checkpoint_name``, and any ``jax.checkpoint`` policy does
        as it says. None of them keeps gathered weights.
      first_k: ``remat`` applies to so many layers of each Stack, the first ones; the
        others keep all activations. None is all layers.
      reshard_after_forward: True drops gathered weights after the forward; False
        keeps them for the backward; a number keeps them sharded over groups of so
        many neighbouring devices, and the backward gathers within a group (on one
        host, say).
      keep_last: so many layers of each Stack, the last ones, keep their gathered
        weights all the same: the backward reads them first.
      prefetch: whether each layer of a Stack runs between the gather of the next one's
        weights and the scatter of the last one's gradients, so that both are hidden; at
        the price of another layer's weights and gradients in memory. None is on GPUs,
        where they can run at the same time.
      reshard_root: the same choice for the root, what is in no Stack or Unit, which
        is otherwise gathered once a step and kept.
      precision: dtypes of parameters, wire, computation and reduction.
      accumulate: micro-batches a step; gradients accumulate as shards. Statistics of
        a batch (``nnx.BatchNorm``) are those of a micro-batch, on all devices, and
        running statistics move with each.
      defer_scatter: gather all weights once a step, add up whole gradients, and
        scatter them once: with micro-batches the traffic of one of them, and memory
        for all weights and gradients (``no_sync`` elsewhere; ZeRO-1 but for the
        parameters between steps, which stay shards).
      loss_scale: whether the loss is scaled in the backward, by a factor that follows
        the gradients; float16 needs it. A step that overflows is skipped and counted.
      min_shard_elements: parameters (of one layer) with fewer elements stay
        replicated: they cost less memory than a message costs time.
      ema_decay: keeps averages of the trained parameters, ``decay * average + (1 -
        decay) * parameter`` after every step, with a smaller decay in the first ones;
        ``state.with_ema_params()`` has them. None keeps none.
      offload: what waits in pinned host memory when it is not used: "optimizer" is its
        state (and the averages), streamed through the update a layer at a time; "all"
        is the parameters, too, whose shards come to the device a layer at a time.
        None keeps all on the device.
      overrides: for module paths (``"blocks.norm*"``, of a Stack without the layer
        index) a mapping with any of remat, first_k, reshard_after_forward, keep_last
        (which are those of Stacks and Units) and precision, which replace the above;
        the first pattern that matches wins.
    """

    remat: Any = "full"
    first_k: int | None = None
    reshard_after_forward: Reshard = True
    keep_last: int = 0
    prefetch: bool | None = None
    reshard_root: Reshard = False
    precision: Precision = Precision()
    accumulate: int = 1
    defer_scatter: bool = False
    loss_scale: bool = False
    min_shard_elements: int = 4096
    ema_decay: float | None = None
    offload: str | None = None
    overrides: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check(**self._fields())
        _check_reshard("reshard_root", self.reshard_root)
        if not _is_count(self.accumulate) or not self.accumulate:
            raise UserError(
                f"policy.accumulate: {self.accumulate!r} must be a positive integer"
            )
        for name in ("defer_scatter", "loss_scale"):
            if not isinstance(value := getattr(self, name), bool):
                raise UserError(f"policy.{name}: {value!r} must be True or False")
        if not _is_count(self.min_shard_elements):
            raise UserError(
                f"policy.min_shard_elements: {self.min_shard_elements!r} must be a "
                "number of elements"
            )
        decay = self.ema_decay
        if decay is not None and not (isinstance(decay, float) and 0 < decay < 1):
            raise UserError(
                f"policy.ema_decay: {decay!r} must be a number above 0 and below 1, "
                "like 0.999"
            )
        if self.offload not in _OFFLOADS:
            raise UserError(
                f"policy.offload: {self.offload!r} is not one of "
                f"{', '.join(map(repr, _OFFLOADS))}"
            )
        if not isinstance(self.overrides, Mapping):
            raise UserError(
                f"policy.overrides: {self.overrides!r} must be a mapping, like "
                "{'blocks.norm*': {'precision': jshard.Precision()}}"
            )
        for pattern, fields in self.overrides.items():
            if not isinstance(fields, Mapping):
                raise UserError(
                    f"policy.overrides[{pattern!r}]: {fields!r} must be a mapping of "
                    f"{', '.join(_OVERRIDABLE)}"
                )
            unknown = sorted(set(fields) - set(_OVERRIDABLE))
            if unknown:
                raise UserError(
                    f"policy.overrides[{pattern!r}]: unknown {', '.join(unknown)}; "
                    f"possible: {', '.join(_OVERRIDABLE)}"
                )
            _check(**self._fields() | dict(fields))

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OVERRIDABLE}

    def _at(self, path: Iterable[Any]) -> dict[str, Any]:
        names = [str(part) for part in path]
        prefixes = [".".join(names[: i + 1]) for i in range(len(names))]
        for pattern, fields in self.overrides.items():
            if any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes):
                return self._fields() | dict(fields)
        return self._fields()

    def unit(self, path: Iterable[Any]) -> UnitPolicy:
        """The policy of the Unit or Stack at ``path``."""
        fields = self._at(path)
        return UnitPolicy(**{name: fields[name] for name in OF_UNITS})

    def precision_at(self, path: Iterable[Any]) -> Precision:
        """The dtypes of the module or parameter at ``path``."""
        return self._at(path)["precision"]

    def offloads_activations(self) -> bool:
        """Whether any layer's activations wait in host memory."""
        chosen = [fields.get("remat") for fields in self.overrides.values()]
        return any(isinstance(remat, Offload) for remat in (self.remat, *chosen))

    def check_groups(self, shards: int) -> None:
        """Raises UserError for a group that does not divide the fsdp axis."""
        chosen = {
            "reshard_root": self.reshard_root,
            "reshard_after_forward": self.reshard_after_forward,
        } | {
            f"overrides[{name!r}].reshard_after_forward": fields[
                "reshard_after_forward"
            ]
            for name, fields in self.overrides.items()
            if "reshard_after_forward" in fields
        }
        for name, group in chosen.items():
            if not isinstance(group, bool) and shards % group:
                sizes = [n for n in range(1, shards + 1) if shards % n == 0]
                raise UserError(
                    f"policy.{name}={group} does not divide the {shards} devices of "
                    "the fsdp axis; possible: True, False, "
                    f"{', '.join(map(str, sizes))}"
                )

    def check_overrides(
        self,
        modules: Iterable[Iterable[Any]],
        units: Iterable[Iterable[Any]],
        stacks: Iterable[Iterable[Any]],
    ) -> None:
        """Raises UserError for a pattern that matches no module, or changes nothing.

        Args:
          modules: paths of all modules.
          units: those of Stacks and Units, which alone are rematerialised, resharded.
          stacks: those of Stacks, whose layers alone are counted.
        """
        for pattern, fields in self.overrides.items():
            if not fnmatch.filter(names := _prefixes(modules), pattern):
                raise UserError(
                    f"policy.overrides: {pattern!r} matches no module; modules are "
                    f"{', '.join(names[:12])}"
                )
            for kind, paths, of_kind in (
                ("Stacks and Units", units, set(OF_UNITS) - _OF_STACKS),
                ("Stacks", stacks, _OF_STACKS),
            ):
                useless = sorted(set(fields) & of_kind)
                names = _prefixes(paths)
                if useless and not fnmatch.filter(names, pattern):
                    raise UserError(
                        f"policy.overrides[{pattern!r}]: {', '.join(useless)} is of "
                        f"whole {kind}, and the pattern matches none; those are "
                        f"{', '.join(names) or 'none'}"
                    )


def _prefixes(paths: Iterable[Iterable[Any]]) -> list[str]:
    """The names of paths and of what they lead through, sorted."""
    parts = [[str(part) for part in path] for path in paths]
    return sorted({".".join(p[: i + 1]) for p in parts for i in range(len(p))})


def _check(
    remat: Any,
    first_k: Any,
    reshard_after_forward: Any,
    keep_last: Any,
    prefetch: Any,
    precision: Any,
) -> None:
    check_remat(remat)
    if first_k is not None and not _is_count(first_k):
        raise UserError(
            f"policy.first_k: {first_k!r} must be None or a number of layers"
        )
    if not _is_count(keep_last):
        raise UserError(f"policy.keep_last: {keep_last!r} must be a number of layers")
    if not isinstance(prefetch, bool | None):
        raise UserError(f"policy.prefetch: {prefetch!r} must be True, False or None")
    _check_reshard("reshard_after_forward", reshard_after_forward)
    if not isinstance(precision, Precision):
        raise UserError(
            f"policy.precision: {precision!r} must be a jshard.Precision(...)"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_reshard(name: str, value: Any) -> None:
    if not isinstance(value, int) or (value is not False and value < 1):
        raise UserError(
            f"policy.{name}: {value!r} must be True, False or the size of a group of "
            "devices"
        )

"""Policy: all knobs of the sharding in one place."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from jshard.errors import UserError
from jshard.knob import Knob, described, knob, knobs
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


_RESHARD: dict[str, Any] = {
    "kind": int,
    "also": (True, False),
    "at_least": 1,
    "noun": "the size of a group of devices",
}


@described
@dataclasses.dataclass(frozen=True)
class UnitPolicy:
    """How one unit (a Unit, or the layers of a Stack) treats its weights."""

    remat: Any = knob(
        "full",
        "activation checkpointing: full recomputes each layer in the backward pass, "
        "dots keeps products with weights, none keeps all activations, names:A+B keeps "
        "these, offload:A+B keeps these in host memory",
        noun="full, dots, none, names:A+B or offload:A+B",
    )
    """In Python also ``Names(...)`` and ``Offload(...)``, for activations named with
    ``jax.ad_checkpoint.checkpoint_name``, or any ``jax.checkpoint`` policy. None of
    them keeps gathered weights."""

    first_k: int | None = knob(
        None,
        "number of layers of a Stack, from the first, to which remat applies; the "
        "others keep all activations; None is all layers",
        kind=int,
        at_least=0,
        noun="a number of layers",
    )

    reshard_after_forward: Reshard = knob(
        True,
        "drop gathered weights after the forward pass and gather them again for the "
        "backward; False keeps them; a number keeps them sharded over groups of so "
        "many devices",
        **_RESHARD,
    )
    """The devices of a group are neighbours, on one host, say; the backward gathers
    within it."""

    keep_last: int = knob(
        0,
        "number of layers of a Stack, from the last, that keep gathered weights for "
        "the backward pass, which reads them first",
        at_least=0,
        noun="a number of layers",
    )

    prefetch: bool | None = knob(
        None,
        "gather each layer's weights while the one before computes; None: on GPUs",
        kind=bool,
    )
    """In the backward pass the last layer's gradients are scattered at the same time,
    so that both are hidden. It takes the memory of another layer's weights and
    gradients. CPU devices do not compute and communicate at the same time."""

    def __post_init__(self):
        check_remat(self.remat)
        for name, declared in knobs(self).items():
            if "." in name or name in ("remat", "overrides"):
                continue  # checked elsewhere
            if not declared.allows(value := getattr(self, name)):
                raise UserError(
                    f"policy.{name}: {value!r} must be {declared.possible()}"
                )


OF_UNITS = tuple(field.name for field in dataclasses.fields(UnitPolicy))
_OF_STACKS = {"first_k", "keep_last", "prefetch"}
_OVERRIDABLE = (*OF_UNITS, "precision")


@described
@dataclasses.dataclass(frozen=True)
class Policy(UnitPolicy):
    """How a model is sharded, what is kept, and in which dtypes.

    What it shares with UnitPolicy holds for all units but those in ``overrides``.
    ``precision`` has the dtypes of parameters, wire, computation and reduction.
    """

    reshard_root: Reshard = knob(
        False,
        "reshard_after_forward of the root, the modules in no Stack or Unit",
        **_RESHARD,
    )
    """The root is otherwise gathered once a step and kept."""

    precision: Precision = Precision()

    accumulate: int = knob(
        1,
        "micro-batches a step (gradient accumulation): less memory for activations",
        at_least=1,
        noun="a number of micro-batches",
    )
    """Gradients accumulate as shards. Statistics of a batch (``nnx.BatchNorm``) are
    those of a micro-batch, on all devices, and running statistics move with each."""

    defer_scatter: bool = knob(
        False, "gather weights and scatter gradients once a step, not each micro-batch"
    )
    """Traffic is that of one micro-batch, and memory holds all weights and gradients:
    ``no_sync`` elsewhere, or ZeRO-1 but for the parameters between steps, which stay
    shards."""

    loss_scale: bool = knob(
        False, "scale the loss in the backward pass, which float16 needs"
    )
    """The factor follows the gradients. A step that overflows is skipped, and
    counted."""

    min_shard_elements: int = knob(
        4096,
        "parameters (of one layer) with fewer elements are replicated",
        at_least=0,
        noun="a number of elements",
    )
    """They cost less memory than a message costs time."""

    ema_decay: float | None = knob(
        None,
        "decay of an exponential moving average of the parameters; None keeps none",
        kind=float,
        above=0,
        below=1,
        noun="a number like 0.999",
    )
    """``decay * average + (1 - decay) * parameter`` after every step, with a smaller
    decay in the first ones; ``state.with_ema_params()`` has the averages."""

    offload: str | None = knob(
        None,
        "what waits in pinned host memory: the optimizer state (and averages), or all "
        "(parameters, too)",
        kind=str,
        choices=("optimizer", "all"),
    )
    """The state is streamed through the update a layer at a time, and the shards of
    parameters come to the device a layer at a time."""

    overrides: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict,
        metadata={
            Knob: Knob(
                (),
                "other values for some modules: PATTERN:KEY=VALUE,..., like "
                "blocks.norm*:compute=float32",
                noun="PATTERN:KEY=VALUE,...",
            )
        },
    )
    """In Python, for patterns of module paths (``"blocks.norm*"``; a Stack's have no
    layer index), mappings with values of a UnitPolicy's fields and of precision; the
    first pattern that matches counts."""

    def __post_init__(self):
        super().__post_init__()
        _check_precision(self.precision)
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
            values = self._fields() | dict(fields)
            _check_precision(values.pop("precision"))
            UnitPolicy(**values)  # checks them

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


def _check_precision(precision: Any) -> None:
    if not isinstance(precision, Precision):
        raise UserError(
            f"policy.precision: {precision!r} must be a jshard.Precision(...)"
        )

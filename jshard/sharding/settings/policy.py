"""Policy: all settings of the sharding."""

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

from jshard.sharding.settings.precision import Precision
from jshard.system.cli.knob import Knob, described, knob, knobs
from jshard.system.errors import UserError

Remat = Literal["full", "attention", "dots", "none"]  # type checkers list these
POLICIES = get_args(Remat)
# The name of what a flash attention kernel reads; "attention" and "dots" keep it.
ATTENTION_OPERANDS = "attention_operands"
INPUTS = "inputs"  # what Offload calls the input of each layer


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
    """Remat policy: keep activations named with ``checkpoint_name`` in host memory.

    They are copied to pinned host memory in the forward and back for the backward.
    Everything else is recomputed. The input of each layer stays on the device, unless
    "inputs" is one of the names.
    """


def check_remat(remat: Any) -> None:
    """Raises UserError unless ``remat`` is a known policy."""
    policy = callable(remat) and not isinstance(remat, type)
    if remat in POLICIES or isinstance(remat, Names) or policy:
        return
    raise UserError(
        f"policy.remat: {remat!r} is not one of {', '.join(POLICIES)}, "
        "jshard.Names(...), jshard.Offload(...) or a jax.checkpoint policy"
    )


# The fields that a run's config may leave to what fits the memory.
BY_MEMORY = ("remat", "accumulate")

Path = Iterable[Any]  # of a module or a parameter in the model

# False keeps full weights for the backward, True none, a number one part of them.
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

    remat: Remat | Names | Callable[..., Any] = knob(
        "full",
        "activation checkpointing: full recomputes each layer in the backward pass, "
        "attention keeps flash attention, dots keeps products with weights, too, none "
        "keeps all activations, names:A+B keeps these, offload:A+B keeps these in host "
        "memory",
        noun="full, attention, dots, none, names:A+B or offload:A+B",
        more="full takes a third more computation and least memory. In Python also "
        "``Names(...)`` and ``Offload(...)``, for activations named with "
        "``jax.ad_checkpoint.checkpoint_name``, or any ``jax.checkpoint`` policy. None "
        "of them keeps gathered weights.",
    )

    first_k: int | None = knob(
        None,
        "number of layers of a Stack, from the first, that remat applies to; the "
        "remaining layers keep all activations; None means all layers",
        kind=int,
        at_least=0,
        noun="a number of layers",
        more="Each of these costs the memory of all its activations.",
    )

    reshard_after_forward: Reshard = knob(
        True,
        "release gathered weights after the forward pass and gather them again for the "
        "backward; False keeps them; a number keeps them sharded over groups of that "
        "many devices",
        **_RESHARD,
        more="True costs a second gather per step, False the memory of all weights, "
        "and a group of g the memory of a g-th of them. Groups consist of neighbouring "
        "devices, such as those of a host; the backward gathers within them.",
    )

    prefetch: bool | None = knob(
        None,
        "gather each layer's weights while the previous layer computes; None: on GPUs",
        kind=bool,
        more="The backward pass also scatters the previous layer's gradients "
        "meanwhile. Prefetching takes memory for the weights and gradients of one more "
        "layer. CPU devices cannot overlap communication and computation.",
    )

    unroll: bool = knob(
        False,
        "compile the layers of a Stack one after the other, without a loop: faster "
        "steps, longer compilation, and without prefetch, or with groups, much more "
        "memory. Layers with weights or activations in host memory stay in a loop",
        more="A loop copies the activations that it keeps into stacked arrays, which "
        "it clears first. Without it, they stay where they are computed. Without "
        "prefetch XLA gathers ahead: a plan of Llama 2 7B on 8 GPUs takes 23 GiB "
        "instead of 12, and with groups of 8 on 64 GPUs 15.1 instead of 5.6.",
    )

    def __post_init__(self) -> None:
        check_remat(self.remat)
        for name, declared in knobs(self).items():
            if "." in name or name in ("remat", "overrides"):
                continue  # checked elsewhere
            if not declared.allows(value := getattr(self, name)):
                raise UserError(
                    f"policy.{name}: {value!r} must be {declared.possible()}"
                )


OF_UNITS = tuple(field.name for field in dataclasses.fields(UnitPolicy))
OF_STACKS = {"first_k", "prefetch", "unroll"}
_OVERRIDABLE = (*OF_UNITS, "precision")


@described
@dataclasses.dataclass(frozen=True)
class Policy(UnitPolicy):
    """How training runs: what is recomputed, gathered and kept, and in which dtypes.

    The fields ``remat`` to ``unroll`` apply to every Unit and Stack that no pattern of
    ``overrides`` matches. ``precision`` is a ``jshard.Precision``.

    ``accumulate``, ``loss_scale`` and ``ema_decay`` are settings of the step. They are
    fields of the policy because states and the planner depend on them as well.
    """

    reshard_root: Reshard = knob(
        False,
        "reshard_after_forward of the root, the modules in no Stack or Unit",
        **_RESHARD,
        more="By default the root is gathered once per step and kept, which costs the "
        "memory of its weights; True gathers it again for the backward.",
    )

    precision: Precision = Precision()

    accumulate: int = knob(
        1,
        "micro-batches per step (gradient accumulation): less memory for activations",
        at_least=1,
        noun="a number of micro-batches",
        more="Weights are gathered and gradients scattered for each micro-batch, "
        "unless defer_scatter. Gradients are accumulated as shards. Batch statistics "
        "(``nnx.BatchNorm``) are those of one micro-batch over all devices, and every "
        "micro-batch updates the running statistics.",
    )

    stages_per_device: int = knob(
        1,
        "stages that each device of a pipeline has: with more it is idle for less time "
        "and sends more",
        at_least=1,
        noun="a number of stages",
        more="They are interleaved. mesh.pipe must divide ``accumulate``.",
    )

    defer_scatter: bool = knob(
        False,
        "gather weights and scatter gradients once per step, not for each micro-batch",
        more="This is ``no_sync`` in other libraries. It takes the traffic of one "
        "micro-batch, and memory for all weights and gradients during the step.",
    )

    loss_scale: bool = knob(
        False,
        "scale the loss in the backward pass, which float16 needs",
        more="The factor adapts. Steps that overflow are skipped and counted.",
    )

    loss_scale_start: float = knob(
        2.0**15, "first loss scale", at_least=1, at_most=2.0**24, more="A power of 2."
    )

    loss_scale_window: int = knob(
        2000, "finite steps until the loss scale doubles", at_least=1, more="To 2**24."
    )

    loss_scale_hysteresis: int = knob(
        1, "which overflow of a scale halves it", at_least=1, more="DeepSpeed has 2."
    )

    min_shard_elements: int = knob(
        4096,
        "parameters (of one layer) with fewer elements are replicated",
        at_least=0,
        noun="a number of elements",
        more="For these a message costs more time than replication costs memory.",
    )

    ema_decay: float | None = knob(
        None,
        "decay of an exponential moving average of the parameters; None keeps none",
        kind=float,
        above=0,
        below=1,
        noun="a number like 0.999",
        more="After each step: ``decay * average + (1 - decay) * parameter``, with a "
        "smaller decay in the first steps. ``state.with_ema_params()`` returns the "
        "averages.",
    )

    offload: Literal["optimizer", "all"] | None = knob(
        None,
        "what is kept in pinned host memory: the optimizer state (and averages), or "
        "all (parameters, too)",
        kind=str,
        choices=("optimizer", "all"),
        more="State goes through the update, and parameters to the device, by layers.",
    )

    offload_layers: int = knob(
        1,
        "layers of a Stack whose offloaded state is on the device at a time",
        at_least=1,
        more="With Muon each matrix of a shape in them has a device of its own.",
    )

    overrides: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict,
        metadata={
            Knob: Knob(
                (),
                "other values for some modules: PATTERN:KEY=VALUE,..., like "
                "blocks.norm*:compute=float32",
                noun="PATTERN:KEY=VALUE,...",
                more="In Python a mapping from patterns of module paths, like "
                "'blocks.norm*' (without the layer index of Stacks), to mappings with "
                "remat, first_k, reshard_after_forward, prefetch, unroll and "
                "precision. The first matching pattern applies.",
            )
        },
    )

    def __post_init__(self) -> None:
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
            if unknown := sorted(set(fields) - set(_OVERRIDABLE)):
                raise UserError(
                    f"policy.overrides[{pattern!r}]: unknown {', '.join(unknown)}; "
                    f"possible: {', '.join(_OVERRIDABLE)}"
                )
            values = self._overridden(fields)
            _check_precision(values.pop("precision"))
            UnitPolicy(**values)  # checks them

    def _overridden(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OVERRIDABLE} | dict(fields)

    def _override(self, path: Path) -> Mapping[str, Any]:
        names = prefixes([path])
        for pattern, fields in self.overrides.items():
            if fnmatch.filter(names, pattern):
                return fields
        return {}

    def unit(self, path: Path) -> UnitPolicy:
        """Returns the policy of the Unit or Stack at ``path``."""
        fields = self._overridden(self._override(path))
        return UnitPolicy(**{name: fields[name] for name in OF_UNITS})

    def precision_at(self, path: Path, own: Any = None) -> Precision:
        """Returns the dtypes of the module or parameter at ``path``.

        Args:
          path: of the module or parameter.
          own: the dtype that the module was given, or None. It is kept if it is wider
            than that of the computation, unless an override names a precision.
        """
        override = self._override(path)
        return override.get("precision") or self.precision.keeping(own)

    def everywhere(self, name: str) -> dict[str, Any]:
        """Returns a field's values, those of overrides too, by their full names."""
        return {name: getattr(self, name)} | {
            f"overrides[{pattern!r}].{name}": fields[name]
            for pattern, fields in self.overrides.items()
            if name in fields
        }

    def products(self) -> set[str]:
        """Returns the float8 products of all modules, by name."""
        return {x.products for x in self.everywhere("precision").values()} - {None}

    def offloads_activations(self) -> bool:
        """Returns whether any layer keeps activations in host memory."""
        return any(isinstance(x, Offload) for x in self.everywhere("remat").values())

    def check_groups(self, shards: int) -> None:
        """Raises UserError for a group that does not divide the fsdp axis."""
        groups = self.everywhere("reshard_after_forward")
        groups["reshard_root"] = self.reshard_root
        for name, group in groups.items():
            if not isinstance(group, bool) and shards % group:
                sizes = [str(n) for n in range(1, shards + 1) if shards % n == 0]
                raise UserError(
                    f"policy.{name}={group} does not divide the {shards} devices of "
                    f"the fsdp axis; possible: {', '.join(['True', 'False', *sizes])}"
                )


def prefixes(paths: Iterable[Path]) -> list[str]:
    """Returns the sorted dotted names of paths and of all their ancestors."""
    parts = [[str(part) for part in path] for path in paths]
    return sorted({".".join(p[: i + 1]) for p in parts for i in range(len(p))})


def _check_precision(x: Any) -> None:
    if not isinstance(x, Precision):
        raise UserError(f"policy.precision: {x!r} must be jshard.Precision(...)")

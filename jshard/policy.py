"""Policy: all knobs of the sharding in one place."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from jshard.errors import UserError
from jshard.precision import Precision
from jshard.remat import Offload, check_remat
from jshard.schedule import UnitPolicy

_OFFLOADS = (None, "optimizer", "all")
_OVERRIDABLE = ("remat", "first_k", "reshard_after_forward", "precision")


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
      precision: dtypes of parameters, wire, computation and reduction.
      accumulate: micro-batches a step; gradients accumulate as shards.
      defer_scatter: with micro-batches, gather all weights once a step, add up whole
        gradients, and scatter them once: the traffic of one micro-batch, and memory
        for all weights and gradients (``no_sync`` elsewhere).
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
        index) a mapping with any of remat, reshard_after_forward and precision, which
        replace the above; the first pattern that matches wins.
    """

    remat: Any = "full"
    first_k: int | None = None
    reshard_after_forward: bool | int = True
    precision: Precision = Precision()
    accumulate: int = 1
    defer_scatter: bool = False
    loss_scale: bool = False
    min_shard_elements: int = 4096
    ema_decay: float | None = None
    offload: str | None = None
    overrides: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check(*self._fields().values())
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise UserError(
                f"policy.accumulate: {self.accumulate!r} must be a positive integer"
            )
        if self.defer_scatter and self.accumulate == 1:
            raise UserError("policy.defer_scatter needs policy.accumulate above 1")
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
        for pattern, fields in self.overrides.items():
            unknown = sorted(set(fields) - set(_OVERRIDABLE))
            if unknown:
                raise UserError(
                    f"policy.overrides[{pattern!r}]: unknown {', '.join(unknown)}; "
                    f"possible: {', '.join(_OVERRIDABLE)}"
                )
            merged = self._fields() | dict(fields)
            _check(*(merged[name] for name in _OVERRIDABLE))

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
        return UnitPolicy(
            fields["remat"], fields["reshard_after_forward"], fields["first_k"]
        )

    def precision_at(self, path: Iterable[Any]) -> Precision:
        """The dtypes of the module or parameter at ``path``."""
        return self._at(path)["precision"]

    def check_groups(self, shards: int) -> None:
        """Raises UserError for a group that does not divide the fsdp axis."""
        for name, fields in {"": self._fields(), **self.overrides}.items():
            group = fields.get("reshard_after_forward", True)
            if not isinstance(group, bool) and shards % group:
                where = f"overrides[{name!r}]." if name else ""
                sizes = [n for n in range(1, shards + 1) if shards % n == 0]
                raise UserError(
                    f"policy.{where}reshard_after_forward={group} does not divide the "
                    f"{shards} devices of the fsdp axis; possible: True, False, "
                    f"{', '.join(map(str, sizes))}"
                )

    def check_overrides(self, paths: Iterable[Iterable[Any]]) -> None:
        """Raises UserError for a pattern that matches no module path."""
        names = {
            ".".join(str(part) for part in list(path)[: i + 1])
            for path in map(list, paths)
            for i in range(len(path))
        }
        for pattern in self.overrides:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"policy.overrides: {pattern!r} matches no module; modules are "
                    f"{', '.join(sorted(names)[:12])}"
                )


def _check(remat: Any, first_k: Any, reshard: Any, precision: Any) -> None:
    check_remat(remat)
    if first_k is not None and (not isinstance(first_k, int) or first_k < 0):
        raise UserError(
            f"policy.first_k: {first_k!r} must be None or a number of layers"
        )
    if first_k is not None and isinstance(remat, Offload):
        raise UserError("policy.first_k does not go with jshard.Offload yet")
    if not isinstance(reshard, int) or (reshard is not False and reshard < 1):
        raise UserError(
            f"policy.reshard_after_forward: {reshard!r} must be True, False or the "
            "size of a group of devices"
        )
    if not isinstance(precision, Precision):
        raise UserError(
            f"policy.precision: {precision!r} must be a jshard.Precision(...)"
        )

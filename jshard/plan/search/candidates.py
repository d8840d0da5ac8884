"""What a search tries: settings of a recipe's keys."""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jshard.plan.fit.hardware import GPU
from jshard.sharding.pipeline.schedule import bubble
from jshard.sharding.settings.policy import POLICIES
from jshard.system.errors import UserError
from jshard.system.formatting import did_you_mean

Settings = dict[str, Any]  # values by key: {"policy.remat": "dots"}

REMAT, RESHARD = "policy.remat", "policy.reshard_after_forward"
AXES, PIPE, PER_DEVICE = "axes", "mesh.pipe", "policy.stages_per_device"
_AXES = ("mesh.context", "mesh.tensor", "mesh.expert", PIPE)
STAGES = (2, 4, 8, 16)  # of a pipeline
# What `--search` varies: other ways to run the same training.
DEFAULT_KNOBS = (
    REMAT,
    "mesh",
    AXES,
    "policy.accumulate",
    "policy.defer_scatter",
    RESHARD,
    "policy.offload",
)
# Knobs that change the numbers that training computes; varied only when named.
CHANGING_KNOBS = ("policy.precision.reduce", "batch_size")
KNOBS = (*DEFAULT_KNOBS, "mesh.context", PIPE, *CHANGING_KNOBS)
# Knobs that set other keys than the one they are named after.
_KEYS = {
    "mesh": ("mesh.replica", "mesh.fsdp"),
    AXES: (*_AXES, PER_DEVICE),
    PIPE: (PIPE, PER_DEVICE),
    "policy.precision.reduce": ("policy.precision.reduce", "policy.precision.sum"),
}
# What is asked of every combination, beside the keys that vary.
_READ = (
    *_AXES,
    "mesh.replica",
    "mesh.fsdp",
    PER_DEVICE,
    RESHARD,
    "policy.accumulate",
    "policy.defer_scatter",
    "batch_size",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A way to run a job: its settings, in addition to the user's."""

    settings: Settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self._words() == other._words()

    def __hash__(self) -> int:
        return hash(self._words())

    def _words(self) -> frozenset[tuple[str, str]]:
        return frozenset((k, str(v)) for k, v in self.settings.items())  # 1 is not True

    @property
    def is_plain(self) -> bool:
        """Whether it needs no further axis of the mesh, and nothing in host memory."""
        hosted = self.settings.get("policy.offload") is not None
        hosted |= str(self.settings.get(REMAT, "")).startswith("offload:")
        return not hosted and not {*_AXES} & {*self.settings}

    def command(self, recipe: str, given: Mapping[str, Any]) -> str:
        """Returns the command line that trains this way, with the user's settings."""
        settings = {**given, **self.settings}
        words = [f"--config.{key}={value}" for key, value in settings.items()]
        line = ["python", "-m", "jshard.train", f"--config={recipe}", *words]
        return shlex.join(line)

    def __str__(self) -> str:
        words = (f"{k.removeprefix('policy.')}={v}" for k, v in self.settings.items())
        return " ".join(words) or "as given"


def parse_search(
    searches: Iterable[str],
    listed: Mapping[str, Sequence[Any]],
    given: Iterable[str],
) -> dict[str, Sequence[Any] | None]:
    """Returns what may vary, by what the command line says.

    ``--search`` varies all ``DEFAULT_KNOBS`` that the user leaves free,
    ``--search=policy.remat,mesh`` only these knobs, and ``--search.KEY=A,B`` one key of
    the config over these values, in place of its knob's own.

    Args:
      searches: the texts of ``--search``; "" if it has none.
      listed: the values of each ``--search.KEY``.
      given: the keys that the user sets, which stay fixed.

    Returns:
      The values to try by key; None stands for the knob's own values.

    Raises:
      UserError: a knob is unknown or given, or a key has no values.
    """
    given = set(given)
    allowed: dict[str, Sequence[Any] | None] = {}
    for text in searches:
        named = [knob for knob in text.split(",") if knob]
        for knob in named:
            _check_knob(knob, given)
        free = [knob for knob in DEFAULT_KNOBS if not _given(knob, given)]
        allowed |= dict.fromkeys(named or free)
    for key, values in listed.items():
        if key in given:
            raise UserError(f"--search.{key}: --config.{key} is given, too; drop one")
        if not values:
            raise UserError(f"--search.{key} needs values: --search.{key}=A,B")
    for knob in _KEYS:
        if _given(knob, listed):
            allowed.pop(knob, None)
    return allowed | dict(listed)


def _check_knob(knob: str, given: Iterable[str]) -> None:
    if knob not in KNOBS:
        hint = did_you_mean(knob, KNOBS)
        raise UserError(
            f"--search={knob}: unknown knob{hint}; possible: {', '.join(KNOBS)}, or "
            "any key of the config with its values: --search.KEY=A,B"
        )
    if _given(knob, given):
        keys = " or ".join(f"--config.{key}" for key in _KEYS.get(knob, (knob,)))
        raise UserError(f"--search={knob}: {keys} is given, too; drop one")


def _given(knob: str, settings: Iterable[str]) -> bool:
    """Whether one of a knob's keys is among these."""
    return not set(settings).isdisjoint(_KEYS.get(knob, (knob,)))


def candidates(
    given: Settings,
    gpu: GPU,
    devices: int,
    allowed: Mapping[str, Sequence[Any] | None],
    names: Sequence[str] = (),
    axes: Sequence[str] = (),
) -> list[Candidate]:
    """Returns all combinations of what may vary; the config as given comes first.

    Of combinations that yield the same program by construction, one is kept: without
    micro-batches there is no scatter to defer; with one shard, or with whole weights
    gathered once per step, there is nothing to reshard.

    Args:
      given: all keys of the user's config.
      gpu: that of the topology, as of ``parse``.
      devices: how many there are.
      allowed: values to try by key; None stands for the knob's own values.
      names: of the model's activations (``checkpoint_name``).
      axes: of the mesh, besides "replica" and "fsdp", that the model can take.
    """
    own = _own_choices(given, gpu, devices, names, axes)
    choices = [
        own[key] if values is None else [{key: value} for value in values]
        for key, values in allowed.items()
    ]
    found: dict[tuple, Candidate] = {}
    varied = {key for parts in choices for part in parts for key in part}
    given = {key: given[key] for key in varied.union(_READ)}
    for parts in [(), *itertools.product(*choices)]:
        settings = {key: value for part in parts for key, value in part.items()}
        everything = given | settings
        if settings and not _keeps_busy(everything, devices, allowed):
            continue
        shards = _shards(everything, gpu, devices)
        group = everything[RESHARD]
        if type(group) is int and group >= shards and RESHARD in settings:
            if allowed[RESHARD] is None:
                continue  # like True, but with a copy in memory
        changes = {k: v for k, v in settings.items() if str(v) != str(given[k])}
        candidate = Candidate(changes)
        found.setdefault(_identity(everything, shards, varied), candidate)
    return list(found.values())


def _keeps_busy(
    settings: Settings, devices: int, allowed: Mapping[str, Sequence[Any] | None]
) -> bool:
    """Whether own choices of stages and micro-batches go together.

    A device is busy for two thirds of a step at least, and no micro-batch is empty.
    """
    micro, stages = settings["policy.accumulate"], settings[PIPE]
    axes = [settings[key] for key in ("mesh.context", "mesh.tensor")]
    if allowed.get("policy.accumulate", ()) is None:
        examples = settings["batch_size"] * math.prod(axes) * stages // devices
        if micro > max(examples, 1):
            return False
    per_device = settings[PER_DEVICE]
    if not {AXES, PIPE} & {knob for knob, values in allowed.items() if values is None}:
        return True
    if per_device > 1 and micro % stages:
        return False
    return bubble(stages, micro, per_device) <= 1 / 3


def _own_choices(
    given: Settings, gpu: GPU, devices: int, names: Sequence[str], axes: Sequence[str]
) -> dict[str, list[Settings]]:
    """Returns the settings that each knob tries unless the user lists values."""
    size, near = given["batch_size"], gpu.domain
    shared = given["mesh.context"] * given["mesh.tensor"]
    parts = max(devices // shared, 1)
    examples = max(size // parts, 1)  # of a part in a step
    # Pipelines pass as many more micro-batches as they have stages.
    stages = max([n for n in STAGES if "pipe" in axes and devices % n == 0], default=1)
    micro = [n for n in _divisors(examples * stages) if n & (n - 1) == 0]
    named = [f"{kind}:{'+'.join(names)}" for kind in ("names", "offload") if names]
    batches = [size * n // 4 for n in (1, 2, 4, 8, 16)]
    values = {
        REMAT: [*POLICIES, *named],
        "mesh.context": [
            n
            for n in _divisors(near)
            if devices % n == 0 and size % (devices // n) == 0
        ],
        "policy.accumulate": micro,
        "policy.defer_scatter": [False, True],
        RESHARD: [True, False, *([near] if devices > near else [])],
        "policy.offload": [None, "optimizer", "all"],
        "batch_size": [n for n in batches if n and n % parts == 0],
    }
    # The fsdp axis lies within a host (or an NVLink domain), or spans complete ones.
    shards = [n for n in _divisors(devices) if near % n == 0 or n % near == 0]
    staged = [
        {PIPE: n} | ({} if per_device == 1 else {PER_DEVICE: per_device})
        for n in STAGES
        for per_device in (1, 2, 4)
        if devices % n == 0
    ]
    sums = [("float32", None), ("bfloat16", "float32"), ("bfloat16", None)]
    choices = {knob: [{knob: value} for value in values[knob]] for knob in values}
    return choices | {
        # One further axis, within a host or domain, or stages; two rarely pay.
        AXES: [{}]
        + [
            {f"mesh.{axis}": n}
            for axis in axes
            for n in _divisors(near)
            if n > 1 and devices % n == 0 and axis != "pipe"
        ]
        + (staged if "pipe" in axes else []),
        PIPE: [{PIPE: 1}, *staged],
        "mesh": [
            {"mesh.replica": devices // n, "mesh.fsdp": -1} for n in reversed(shards)
        ],
        "policy.precision.reduce": [
            {"policy.precision.reduce": reduce, "policy.precision.sum": total}
            for reduce, total in sums
        ],
    }


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _shards(settings: Settings, gpu: GPU, devices: int) -> int:
    """Returns the number of shards, or 0 if the mesh is invalid."""
    replica, fsdp = settings["mesh.replica"], settings["mesh.fsdp"]
    if fsdp != -1:
        return fsdp * math.prod(settings[key] for key in _AXES)
    return gpu.host if replica == "hosts" else devices // replica


def _identity(settings: Settings, shards: int, varied: set[str]) -> tuple:
    """Returns a key that is equal for settings that yield the same program."""
    reshard, scatter = settings[RESHARD], settings["policy.defer_scatter"]
    if settings["policy.accumulate"] == 1:
        scatter = False
    if shards == 1 or scatter:
        reshard = True
    same = {"mesh.fsdp": shards, "policy.defer_scatter": scatter, RESHARD: reshard}
    # 1 is not True.
    return *map(str, same.values()), *(str(settings[x]) for x in varied - {*same})

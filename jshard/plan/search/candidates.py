"""What a search tries: settings of a recipe's keys, as the command line has them."""

import dataclasses
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence

from jshard.errors import UserError
from jshard.plan.topology import GPUS_A_HOST
from jshard.training.config.config import Config, flatten, nearest

Settings = dict[str, str]  # text by key: {"policy.remat": "dots"}

REMAT, RESHARD = "policy.remat", "policy.reshard_after_forward"
# What `--search` varies: how the same training is done.
DEFAULT_KNOBS = (
    REMAT,
    "mesh",
    "policy.accumulate",
    "policy.defer_scatter",
    RESHARD,
    "policy.offload",
)
# What changes the numbers that training computes; varied only when named.
CHANGING_KNOBS = ("policy.precision.reduce", "batch_size")
KNOBS = DEFAULT_KNOBS + CHANGING_KNOBS
# Knobs that set other keys than the one they are named after.
_KEYS = {
    "mesh": ("mesh.replica", "mesh.fsdp"),
    "policy.precision.reduce": ("policy.precision.reduce", "policy.precision.sum"),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a job.

    Attributes:
      settings: what it changes, beside what the user gave: text by key.
    """

    settings: Settings

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.settings.items())))

    def command(self, recipe: str, overrides: Mapping[str, str]) -> str:
        """The command line that trains so.

        Args:
          recipe: as the user names it.
          overrides: what the user gave.
        """
        given = {**overrides, **self.settings}
        words = [f"--config.{key}={value}" for key, value in given.items()]
        line = ["python", "-m", "jshard.train", f"--config={recipe}", *words]
        return shlex.join(line)

    def __str__(self) -> str:
        words = (f"{k.removeprefix('policy.')}={v}" for k, v in self.settings.items())
        return " ".join(words) or "as given"


def parse_search(
    words: Iterable[str], overrides: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """Reads what may vary from the words of a command line.

    ``--search`` varies all of ``DEFAULT_KNOBS`` that ``overrides`` does not give;
    ``--search=policy.remat,mesh`` these knobs; ``--search.KEY=A,B`` one key of the
    config over these values, in place of its knob's own.

    Args:
      words: those that begin with ``--search``.
      overrides: keys that the user gave, which stay as they are.

    Returns:
      The values to try by key; None leaves them to ``candidates``.

    Raises:
      UserError: a knob is not known, is given as well, or has no values.
    """
    allowed: dict[str, tuple[str, ...] | None] = {}
    listed: dict[str, tuple[str, ...] | None] = {}
    for word in words:
        option, _, text = word.partition("=")
        values = tuple(part for part in text.split(",") if part)
        if option == "--search" and not values:
            free = [knob for knob in DEFAULT_KNOBS if not _given(knob, overrides)]
            allowed |= dict.fromkeys(free)
        elif option == "--search":
            for knob in values:
                _check_knob(knob, overrides)
            allowed |= dict.fromkeys(values)
        elif option.startswith("--search."):
            key = option.removeprefix("--search.")
            if key in overrides:
                raise UserError(f"{word}: --config.{key} is given, too; drop one")
            if not values:
                raise UserError(f"{option} needs values: {option}=A,B")
            listed[key] = values
        else:
            raise UserError(f"unknown argument {word!r}; see --help")
    for knob, keys in _KEYS.items():
        if any(key in listed for key in keys):
            allowed.pop(knob, None)
    return allowed | listed


def _check_knob(knob: str, overrides: Mapping[str, str]) -> None:
    if knob not in KNOBS:
        hint = nearest(knob, KNOBS)
        raise UserError(
            f"--search={knob}: unknown knob{hint}; possible: {', '.join(KNOBS)}, or "
            "any key of the config with its values: --search.KEY=A,B"
        )
    if _given(knob, overrides):
        keys = " or ".join(f"--config.{key}" for key in _KEYS.get(knob, (knob,)))
        raise UserError(f"--search={knob}: {keys} is given, too; drop one")


def _given(knob: str, overrides: Mapping[str, str]) -> bool:
    return any(key in overrides for key in _KEYS.get(knob, (knob,)))


def candidates(
    config: Config,
    devices: int,
    allowed: Mapping[str, Sequence[str] | None],
    names: Sequence[str] = (),
) -> list[Candidate]:
    """All combinations of what may vary, the config as it is first.

    Of those that are the same program by construction only one is kept: without
    micro-batches there is no scatter to defer, on an fsdp axis of one device nothing
    to reshard, and where whole weights are gathered once a step neither.

    Args:
      config: the user's.
      devices: how many there are.
      allowed: values to try by key; None takes the knob's own.
      names: of activations (``checkpoint_name``).
    """
    flat = {key: str(value) for key, value in flatten(config).items()}
    own = _own_choices(config, devices, names)
    for key in allowed:
        if key not in own and key not in flat:
            raise UserError(
                f"--search.{key}: the recipe has no such key{nearest(key, flat)}"
            )
    choices = [
        own[key] if values is None else [{key: value} for value in values]
        for key, values in allowed.items()
    ]
    found: dict[tuple, Candidate] = {}
    for parts in [(), *itertools.product(*choices)]:
        settings = {key: value for part in parts for key, value in part.items()}
        everything = flat | settings
        shards = _shards(everything, devices)
        group = everything[RESHARD]
        if group.isdigit() and int(group) >= shards and RESHARD in settings:
            if allowed[RESHARD] is None:
                continue  # a group of all: as True, with a copy in memory
        candidate = Candidate({k: v for k, v in settings.items() if v != flat[k]})
        found.setdefault(_identity(everything, shards), candidate)
    return list(found.values())


def _own_choices(
    config: Config, devices: int, names: Sequence[str]
) -> dict[str, list[Settings]]:
    examples = max(config.batch_size // devices, 1)  # a device, of a whole step
    marked = [f"{kind}:{'+'.join(names)}" for kind in ("names", "offload") if names]
    groups = [
        n for n in _divisors(devices) if GPUS_A_HOST % n == 0 or not n % GPUS_A_HOST
    ]
    reshard = ["True", "False"]
    if devices > GPUS_A_HOST:
        reshard.append(str(GPUS_A_HOST))
    sums = [("float32", "None"), ("bfloat16", "float32"), ("bfloat16", "None")]
    batches = [config.batch_size * n // 4 for n in (1, 2, 4, 8, 16)]
    return {
        REMAT: _of(REMAT, ["full", "dots", "none", *marked]),
        "mesh": [
            {"mesh.replica": str(devices // n), "mesh.fsdp": "-1"}
            for n in reversed(groups)
        ],
        "policy.accumulate": _of(
            "policy.accumulate",
            [str(n) for n in _divisors(examples) if n & (n - 1) == 0],
        ),
        "policy.defer_scatter": _of("policy.defer_scatter", ["False", "True"]),
        RESHARD: _of(RESHARD, reshard),
        "policy.offload": _of("policy.offload", ["None", "optimizer", "all"]),
        "policy.precision.reduce": [
            {"policy.precision.reduce": wire, "policy.precision.sum": total}
            for wire, total in sums
        ],
        "batch_size": _of(
            "batch_size", [str(n) for n in batches if n and n % devices == 0]
        ),
    }


def _of(key: str, values: Iterable[str]) -> list[Settings]:
    return [{key: value} for value in values]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _shards(settings: Mapping[str, str], devices: int) -> int:
    """The size of the fsdp axis; 0 where the settings are no mesh."""
    replica, fsdp = settings["mesh.replica"], settings["mesh.fsdp"]
    if fsdp.isdigit():
        return int(fsdp)
    if replica == "hosts":
        return min(devices, GPUS_A_HOST)
    return devices // int(replica) if replica.isdigit() and int(replica) else 0


def _identity(settings: Mapping[str, str], shards: int) -> tuple:
    """Equal for settings that make the same program."""
    same = {**settings, "mesh.fsdp": str(shards)}
    if same["policy.accumulate"] == "1":
        same["policy.defer_scatter"] = "False"
    if shards == 1 or same["policy.defer_scatter"] == "True":
        same[RESHARD] = "True"
    return tuple(sorted(same.items()))

"""From the keys of `config.policy` to a `jshard.Policy`."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from jshard.sharding.settings.policy import POLICIES, Names, Offload, Policy, UnitPolicy
from jshard.sharding.settings.precision import Precision
from jshard.system.cli.knob import Knob, knobs
from jshard.system.cli.options import read_value
from jshard.system.compat.xla_options import check_options
from jshard.system.errors import UserError

_OF_UNITS = knobs(UnitPolicy) | knobs(Precision)  # what `policy.overrides` can set
_OF_XLA = Knob(None, "")  # whose options have no declarations


def make_policy(
    config: ConfigDict, changes: Mapping[str, Any] = MappingProxyType({})
) -> Policy:
    """Returns the `jshard.Policy` that `config.policy` describes.

    Args:
      config: The complete config.
      changes: Values of its keys, like "policy.remat", that take the place of its own.

    Raises:
      UserError: A value is not possible.
    """
    fields = config.policy.to_dict()
    for key, value in changes.items():
        *groups, name = key.split(".")[1:]
        functools.reduce(operator.getitem, groups, fields)[name] = value
    precision = fields.pop("precision")
    fields["overrides"] = _overrides(fields["overrides"], precision)
    fields["remat"] = parse_remat(fields["remat"])
    return Policy(**fields, precision=Precision(**precision))


def write_policy(config: ConfigDict, policy: Policy) -> None:
    """Sets the keys of `config.policy` to those of a policy, for the record.

    A remat policy that is a function is its name.
    """
    values = {name: operator.attrgetter(name)(policy) for name in knobs(Policy)}
    values["overrides"] = tuple(
        f"{pattern}:{name}={_plain(value)}"
        for pattern, fields in policy.overrides.items()
        for name, value in fields.items()
    )
    with config.policy.ignore_type():
        config.policy.update_from_flattened_dict(
            {key: _plain(value) for key, value in values.items()}
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Names):
        kind = "offload" if isinstance(value, Offload) else "names"
        return f"{kind}:{'+'.join(value.names)}"
    return getattr(value, "__name__", repr(value)) if callable(value) else value


def parse_remat(remat: Any) -> Any:
    """Parses `names:a+b` and `offload:a+b`, which keep or offload named activations."""
    if not isinstance(remat, str) or remat in POLICIES:
        return remat
    kind, colon, names = remat.partition(":")
    policies = {"names": Names, "offload": Offload}
    if kind not in policies or not names:
        kept = "" if colon or kind in policies else f" (names:{remat} keeps {remat!r})"
        raise UserError(
            f"--config.policy.remat={remat}: must be {', '.join(POLICIES)}, "
            f"names:A+B or offload:A+B with names of activations{kept}"
        )
    return policies[kind](*names.split("+"))


def _overrides(entries: Iterable[str], precision: dict[str, Any]) -> dict[str, dict]:
    """Parses entries like `blocks.norm*:compute=float32`, in their order."""
    overrides: dict[str, dict[str, Any]] = {}
    for entry in entries:
        pattern, colon, setting = str(entry).partition(":")
        key, equals, text = setting.partition("=")
        if not (pattern and colon and equals) or key not in _OF_UNITS:
            raise UserError(
                f"--config.policy.overrides={entry}: must be PATTERN:KEY=VALUE, with "
                f"a pattern of module paths and KEY one of {', '.join(_OF_UNITS)}"
            )
        fields = overrides.setdefault(pattern, {})
        option = f"config.policy.overrides={pattern}:{key}"
        value = read_value(option, text, _OF_UNITS[key])
        if key in knobs(Precision):
            base = fields.get("precision", Precision(**precision))
            fields["precision"] = dataclasses.replace(base, **{key: value})
        else:
            fields[key] = parse_remat(value) if key == "remat" else value
    return overrides


def parse_options(entries: Iterable[str]) -> dict[str, Any]:
    """Parses `config.compiler_options`: entries like `xla_gpu_autotune_level=0`.

    Raises:
      UserError: An entry is not NAME=VALUE, or XLA has no such option or value.
    """
    options = {}
    for entry in map(str, entries):
        name, equals, text = entry.partition("=")
        if not (name and equals):
            raise UserError(
                f"--config.compiler_options={entry}: must be NAME=VALUE, an option of "
                "XLA and its value; None leaves the choice to XLA"
            )
        options[name] = _OF_XLA.read(text)
    check_options({k: v for k, v in options.items() if v is not None})
    return options

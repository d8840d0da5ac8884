"""From the keys of `config.policy` to a `jshard.Policy`."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jshard
from jshard.compat.xla_options import check_options
from jshard.errors import UserError
from jshard.policy import OF_UNITS
from jshard.training.config.command_line import parse_value
from jshard.training.config.config import Config

_PRECISION = tuple(field.name for field in dataclasses.fields(jshard.Precision))
_KEYS = (*OF_UNITS, *_PRECISION)


def make_policy(config: Config) -> jshard.Policy:
    """Returns the `jshard.Policy` that `config.policy` describes.

    Raises:
      UserError: A value is not possible.
    """
    fields = config.policy.to_dict()
    overrides = _overrides(fields.pop("overrides"), fields.pop("precision"))
    fields["remat"] = parse_remat(fields["remat"])
    return jshard.Policy(
        **fields, precision=make_precision(config), overrides=overrides
    )


def make_precision(config: Config) -> jshard.Precision:
    """Returns the `jshard.Precision` that `config.policy.precision` describes."""
    return jshard.Precision(**config.policy.precision.to_dict())


def parse_remat(remat: Any) -> Any:
    """Parses `names:a+b` and `offload:a+b`, which keep or offload named activations."""
    kind, colon, names = str(remat).partition(":")
    policies = {"names": jshard.Names, "offload": jshard.Offload}
    if not colon:
        return remat
    if kind not in policies or not names:
        raise UserError(
            f"--config.policy.remat={remat}: must be full, dots, none, names:A+B or "
            "offload:A+B with names of activations"
        )
    return policies[kind](*names.split("+"))


def _overrides(entries: Iterable[str], precision: dict[str, Any]) -> dict[str, dict]:
    """Parses entries like `blocks.norm*:compute=float32`, in their order."""
    overrides: dict[str, dict[str, Any]] = {}
    for entry in entries:
        pattern, colon, setting = str(entry).partition(":")
        key, equals, text = setting.partition("=")
        if not (pattern and colon and equals) or key not in _KEYS:
            raise UserError(
                f"--config.policy.overrides={entry}: must be PATTERN:KEY=VALUE, with "
                f"a pattern of module paths and KEY one of {', '.join(_KEYS)}"
            )
        fields = overrides.setdefault(pattern, {})
        value = parse_value(text, None)
        if key in _PRECISION:
            base = fields.get("precision", jshard.Precision(**precision))
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
        options[name] = parse_value(text, None)
    check_options({k: v for k, v in options.items() if v is not None})
    return options

"""Rotary positions in a config.json, as transformers 4 and 5 spell them.

Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 ``rope_parameters``; Gemma
3 has them twice, for layers with and without a window. Both spellings are read, and
both are written.
"""

from collections.abc import Mapping
from typing import Any

import jshard
from models.llama_config import LlamaConfig

Json = Mapping[str, Any]


def read_rope(
    json: Json, *, theta: float, context: int, local: bool, scalings: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the keys of ``LlamaConfig`` of rotary positions.

    Args:
      json: the content of a config.json.
      theta: of the architecture, if the file has none.
      context: the longest text that the model is meant for.
      local: whether layers with a sliding window have a theta of their own.
      scalings: those that the architecture can have.

    Raises:
      UserError: a kind of scaling is not there, or lacks a key.
    """
    theta = json.get("rope_theta") or theta
    parameters = json.get("rope_parameters") or {}
    near = {"rope_theta": json.get("rope_local_base_freq", 10000.0)}
    if "full_attention" in parameters:  # one for each type of layer
        full = {"rope_theta": theta, **parameters["full_attention"]}
        near |= parameters.get("sliding_attention") or {}
    else:
        full = {"rope_theta": theta, **(json.get("rope_scaling") or {}), **parameters}
    if full.get("partial_rotary_factor", 1) not in (1, None):
        raise jshard.UserError(
            f"config.json: partial_rotary_factor={full['partial_rotary_factor']!r} is "
            "not supported"
        )
    kind = full.get("rope_type", full.get("type", "default"))
    length = full.get("original_max_position_embeddings") or context
    model: dict[str, Any] = {"rope_theta": float(full["rope_theta"])}
    if local:
        known("rope_type", near.get("rope_type", "default"), ("default",))
        model["sliding_theta"] = float(near["rope_theta"])
    if known("rope_type", kind, ("default", *scalings)) == "default":
        return model
    keys = {"rope_factor": "factor"}
    if kind == "llama3":
        keys |= {"rope_low": "low_freq_factor", "rope_high": "high_freq_factor"}
        model["rope_length"] = length
    for ours, theirs in keys.items():
        if theirs not in full:
            raise jshard.UserError(f"config.json: rope scaling {kind} lacks {theirs!r}")
        model[ours] = float(full[theirs])
    model["rope_scaling"] = kind
    if kind == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim", "truncate"):
            if full.get(key) is not None:
                raise jshard.UserError(f"config.json: {key} of yarn is not supported")
        model["rope_low"] = float(full.get("beta_slow") or 1)
        model["rope_high"] = float(full.get("beta_fast") or 32)
        model["rope_length"] = length
    return model


def write_rope(config: LlamaConfig, *, local: bool) -> dict[str, Any]:
    """Returns the keys of rotary positions in both spellings.

    Args:
      config: the model's.
      local: as for ``read_rope``.
    """
    scaling: dict[str, Any] = {"rope_type": config.rope_scaling}
    if config.rope_scaling == "none":
        scaling = {"rope_type": "default"}
    else:
        scaling["factor"] = config.rope_factor
    if config.rope_scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = config.rope_length
        names = {"llama3": ("low_freq_factor", "high_freq_factor")}
        low, high = names.get(config.rope_scaling, ("beta_slow", "beta_fast"))
        scaling |= {low: config.rope_low, high: config.rope_high}
    parameters: dict[str, Any] = {"rope_theta": config.rope_theta, **scaling}
    json: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling == "none" else scaling,
    }
    if local:
        theta = config.sliding_theta or config.rope_theta
        json["rope_local_base_freq"] = theta
        near = {"rope_type": "default", "rope_theta": theta}
        parameters = {"full_attention": parameters, "sliding_attention": near}
    return {**json, "rope_parameters": parameters}


def known(what: str, value: str, known: Any) -> Any:
    """Returns what ``known`` says of a value, or the value where it is no mapping."""
    if value not in known:
        raise jshard.UserError(
            f"config.json: {what} {value!r} is not supported; those are "
            f"{', '.join(known)}"
        )
    return known[value] if isinstance(known, Mapping) else value

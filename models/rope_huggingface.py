"""Rotary positions in a config.json, as transformers 4 and 5 spell them.

Version 4 has ``rope_theta`` and ``rope_scaling``, version 5 ``rope_parameters``; Gemma
3 and OLMo 3 have them twice, for layers with and without a window. Both spellings are
read, and both are written. Where a file has both, ``rope_scaling`` wins, as in
transformers.
"""

from collections.abc import Collection
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    POSITIVE,
    ConfigJson,
    Kind,
    one_of,
)
from jshard.models.llama_config import LlamaConfig
from jshard.models.rope import Rope

# Keys within ``rope_parameters``; a kind of scaling reads some of them.
_OF_SCALINGS = """
    type factor low_freq_factor high_freq_factor original_max_position_embeddings
    beta_slow beta_fast attention_factor mscale mscale_all_dim truncate short_factor
    long_factor finetuned
    """.split()
_WHOLE = (None, 1, 1.0)
_OLMO_THETA = 500000.0
# What may rotate a part of each head alone.
_PARTIAL = ("Glm4MoeForCausalLM",)
_PART = Kind("above 0 and at most 1", lambda x: POSITIVE.fits(x) and x <= 1)


def read_rope(
    config: ConfigJson, *, theta: float, context: int, scalings: Collection[str]
) -> dict[str, Any]:
    """Returns the keys of ``LlamaConfig`` of rotary positions.

    Args:
      config: a config.json.
      theta: of the architecture, if the file has none.
      context: the longest text that the model is meant for.
      scalings: those that the architecture can have.

    Raises:
      UserError: a kind of scaling is not there, or lacks a key.
    """
    part = 1.0
    if config.name in _PARTIAL:
        part = config.get("partial_rotary_factor", 0.5, _PART)
    else:
        config.fix("partial_rotary_factor", _WHOLE)
    theta = config.get("rope_theta", theta, POSITIVE)
    both = [config.within(key) for key in ("rope_scaling", "rope_parameters")]
    chosen = [parameters for parameters in both if parameters]
    if not chosen:
        if config.name == "GptOssForCausalLM":
            config.need("rope_scaling", OBJECT)
        return {"rope_theta": float(theta), "rotary_part": part}
    return _read_parameters(chosen[0], theta, context, scalings, part)


def read_two_ropes(
    config: ConfigJson, *, theta: float, context: int, scalings: Collection[str]
) -> dict[str, Any]:
    """Returns the same where layers with a window have a rotation of their own.

    The arguments are as for ``read_rope``; ``theta`` is that of layers without a
    window.
    """
    config.fix("partial_rotary_factor", _WHOLE)
    theta = config.get("rope_theta", theta, POSITIVE)
    near_theta = 10000.0
    if config.name == "Gemma3ForCausalLM":
        near_theta = config.get("rope_local_base_freq", near_theta, POSITIVE)
    scaling, parameters = map(config.within, ("rope_scaling", "rope_parameters"))
    full = near = None
    if parameters:
        full, near = map(parameters.within, ("full_attention", "sliding_attention"))
        parameters.finish()
    if scaling and scaling.has("type") and not scaling.has("rope_type"):
        raise scaling.error("type", "transformers 5 passes over it: name it rope_type")
    if scaling and full:
        full = full | scaling
    full = full or scaling
    if full:
        full.fix("truncate", [True])  # transformers passes over it
    if config.name == "Olmo3ForCausalLM":
        near_theta = _OLMO_THETA
        if theta != near_theta and not (near and near.has("rope_theta")):
            raise config.error(
                "rope_theta",
                "transformers 4 has it in all layers, and 5 not in those with a "
                "window: set rope_parameters.sliding_attention.rope_theta",
            )
    local = _read_parameters(near, near_theta, context, ()) if near else {}
    return {
        "rope_theta": float(theta),
        **(_read_parameters(full, theta, context, scalings) if full else {}),
        "sliding_theta": local.get("rope_theta", float(near_theta)),
    }


def _read_parameters(
    rope: ConfigJson,
    theta: float,
    context: int,
    scalings: Collection[str],
    part: float = 1.0,
) -> dict[str, Any]:
    """Returns the keys of ``LlamaConfig`` that one rotation's object decides.

    Beside them is "rotary_part", of the dimensions of a head.
    """
    if rope.name in _PARTIAL:
        part = rope.get("partial_rotary_factor", part, _PART)
    else:
        rope.fix("partial_rotary_factor", _WHOLE)
    kinds = one_of(["default", *scalings])
    spelled = "rope_type" if rope.has("rope_type") else "type"
    kind = rope.get(spelled, "default", kinds)
    model: dict[str, Any] = {
        "rope_theta": float(rope.get("rope_theta", theta, POSITIVE)),
        "rotary_part": part,
    }
    if kind != "default":
        model["rope_scaling"] = kind
    if kind == "linear":
        model["rope_factor"] = float(rope.need("factor", POSITIVE))
    if kind in ("llama3", "yarn"):
        model["rope_length"] = rope.get(
            "original_max_position_embeddings", context, COUNT
        )
    if kind == "llama3":
        model["rope_factor"] = float(rope.need("factor", POSITIVE))
        model["rope_low"] = float(rope.need("low_freq_factor", POSITIVE))
        model["rope_high"] = float(rope.need("high_freq_factor", POSITIVE))
        if model["rope_high"] <= model["rope_low"]:
            raise rope.error("high_freq_factor", "it must be above low_freq_factor")
    if kind == "yarn":
        factor = rope.need("factor", POSITIVE.or_null)
        model["rope_factor"] = float(factor or context / model["rope_length"])
        # transformers takes 0 for a missing one.
        model["rope_low"] = float(rope.get("beta_slow", 1, NUMBER.or_null) or 1)
        model["rope_high"] = float(rope.get("beta_fast", 32, NUMBER.or_null) or 32)
        factor = rope.get("attention_factor", None, POSITIVE.or_null)
        model["rope_attention_factor"] = float(factor or 0)
        if rope.name == "DeepseekV3ForCausalLM":
            model |= _read_mscales(rope, model["rope_factor"], factor)
        model["rope_truncate"] = rope.get("truncate", True, FLAG)
    if "rope_mscale" not in model:
        for key in ("mscale", "mscale_all_dim"):
            rope.fix(key, [None])
    rope.finish(_OF_SCALINGS)
    return model


def _read_mscales(
    rope: ConfigJson, factor: float, attention_factor: float | None
) -> dict[str, float]:
    """Returns DeepSeek's factors of rotated dimensions, and of all."""
    mscale = rope.get("mscale", None, NUMBER.or_null)
    mscale_all = rope.get("mscale_all_dim", 0, NUMBER)
    found = {"rope_mscale": float(mscale_all)}
    if attention_factor is None and mscale and mscale_all:
        scaled = Rope(1.0, "yarn", factor, mscale=mscale).temperature()
        all_scaled = Rope(1.0, "yarn", factor, mscale=mscale_all).temperature()
        found["rope_attention_factor"] = scaled / all_scaled
    return found


def write_rope(config: LlamaConfig, *, two: bool) -> dict[str, Any]:
    """Returns the keys of rotary positions in both spellings.

    With ``two``, layers with a sliding window have a rotation of their own.
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
    if config.rope_scaling == "yarn":
        scaling["truncate"] = config.rope_truncate
        if config.rope_mscale:
            scaling["mscale_all_dim"] = config.rope_mscale
    if config.rope_attention_factor:
        scaling["attention_factor"] = config.rope_attention_factor
    parameters: dict[str, Any] = {"rope_theta": config.rope_theta, **scaling}
    if config.rotary_width and not config.kv_rank:
        parameters["partial_rotary_factor"] = config.rotary_width / config.H
    json: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling == "none" else scaling,
    }
    if two:
        theta = config.sliding_theta or config.rope_theta
        near = {"rope_type": "default", "rope_theta": theta}
        parameters = {"full_attention": parameters, "sliding_attention": near}
    return {**json, "rope_parameters": parameters}

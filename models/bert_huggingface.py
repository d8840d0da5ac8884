"""BERT in Hugging Face's folders: config.json and tensor names.

A folder of ``BertForPreTraining`` is read as the masked language model in it. The files
that google-bert has published call the scales of norms gamma, and their biases beta.
"""

from collections.abc import Mapping
from typing import Any

from jshard.models.huggingface_config import (
    COUNT,
    NUMBER,
    ConfigJson,
    one_of,
    read_sizes,
    write_sizes,
)
from jshard.models.tensor_places import linear
from jshard.storage.hub.file_tensor import FileTensor

_NAMES = ("BertForMaskedLM", "BertForPreTraining")
# What models/bert.py computes; config.json may say it in these ways, or not at all.
_FIXED = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
# Our keys, and config.json's with their defaults and kinds.
_SIZES = {
    "vocab_size": ("vocab_size", 30522, COUNT),
    "sequence_length": ("max_position_embeddings", 512, COUNT),
    "num_layers": ("num_hidden_layers", 12, COUNT),
    "num_heads": ("num_attention_heads", 12, COUNT),
    "width": ("hidden_size", 768, COUNT),
    "hidden": ("intermediate_size", 3072, COUNT),
    "token_types": ("type_vocab_size", 2, COUNT),
    "norm_eps": ("layer_norm_eps", 1e-12, NUMBER),
}
# What changes nothing: dropout is of training, and the pooler's are not read.
_INERT = """
    attention_probs_dropout_prob directionality hidden_dropout_prob is_encoder_decoder
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type
    """.split()
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_OLDER = {"weight": "gamma", "bias": "beta"}


def read_config(json: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of ``BertConfig`` that a config.json decides."""
    config = ConfigJson.of(json, _NAMES, _FIXED, {"bert": _NAMES[0]})
    activation = config.get("hidden_act", "gelu", one_of(_ACTIVATIONS))
    model = {**read_sizes(config, _SIZES), "activation": _ACTIVATIONS[activation]}
    config.finish(_INERT)
    return model


def write_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json for a model."""
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    return {
        **write_sizes(model, _NAMES[0], "bert", _SIZES),
        "hidden_act": theirs[model["activation"]],
        "tie_word_embeddings": True,
    }


def tensors(model: Mapping[str, Any]) -> dict[str, FileTensor]:
    """Returns where the files keep each array, by its name, one layer at a time."""
    embeddings, head = "bert.embeddings", "cls.predictions"
    tables = {"embed": "word", "positions": "position", "types": "token_type"}
    found = {
        f"{ours}.embedding": FileTensor((f"{embeddings}.{theirs}_embeddings.weight",))
        for ours, theirs in tables.items()
    }
    found |= _norm("norm", f"{embeddings}.LayerNorm")
    found |= linear("head.dense", f"{head}.transform.dense")
    found |= _norm("head.norm", f"{head}.transform.LayerNorm")
    found["head.bias"] = FileTensor((f"{head}.bias",))
    if model.get("pooler"):
        found |= linear("pooler", "bert.pooler.dense")
    for i in range(model["num_layers"]):
        block, layer = f"blocks.{i}", f"bert.encoder.layer.{i}"
        for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
            name = f"{layer}.attention.self.{theirs}"
            found |= linear(f"{block}.attention.{ours}", name)
        found |= linear(f"{block}.attention.out", f"{layer}.attention.output.dense")
        found |= _norm(f"{block}.norm1", f"{layer}.attention.output.LayerNorm")
        found |= linear(f"{block}.up", f"{layer}.intermediate.dense")
        found |= linear(f"{block}.down", f"{layer}.output.dense")
        found |= _norm(f"{block}.norm2", f"{layer}.output.LayerNorm")
    return found


def _norm(ours: str, theirs: str) -> dict[str, FileTensor]:
    return {
        f"{ours}.{own}": FileTensor(
            (f"{theirs}.{kind}",), older=((f"{theirs}.{_OLDER[kind]}",),)
        )
        for own, kind in (("scale", "weight"), ("bias", "bias"))
    }

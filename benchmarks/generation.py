"""Tokens/s of decoding and of reading prompts beside transformers, on one folder.

    JAX_NUM_CPU_DEVICES=1 python benchmarks/generation.py DIR [--length=64] [--runs=5]

needs torch and transformers, in the same environment. Both compute in float32 with a
cache, from the same token ids, in turn; the best run of each counts. Their tokens must
be the same.
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from jshard.inference.generation import Generator, Sampling
from jshard.inference.trained.trained_model import open_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "A list of the planets of the solar system:",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three most important inventions of the nineteenth century were the",
    "She opened the door and",
    "In mathematics, a group is",
]
STARTS = ("", "Please continue: ", "An example.\n", "Here is a text to complete.\n")
LONG = 256  # tokens of a prompt whose reading is timed


def with_transformers(model, prompts: list[np.ndarray], length: int) -> list[list[int]]:
    """Prompts of different lengths are padded on the left."""
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, longest:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    theirs = AutoModelForCausalLM.from_pretrained(
        arguments.folder, dtype=torch.float32
    ).eval()
    with open_model(arguments.folder) as model:
        tokenizer = model.tokenizer()
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        texts = [start + text for start in STARTS for text in PROMPTS]
        prompts = [np.array([*begin, *tokenizer.encode(text)]) for text in texts]
        ours = Generator(model.load_whole(jax.devices()[0]))
    for batch in (1, 8, 32):
        compare(theirs, ours, prompts[:batch], arguments.length, arguments.runs)
    text = np.concatenate(prompts)
    for batch in (1, 8):
        long = [np.roll(np.resize(text, LONG), shift) for shift in range(batch)]
        compare(theirs, ours, long, 1, arguments.runs)


def compare(theirs, ours, prompts: list[np.ndarray], length: int, count: int) -> None:
    """Prints rates: of the tokens generated, or of the prompts' where that is one."""
    batch, options = len(prompts), {"length": length, "sampling": Sampling(0)}
    runs = {
        "transformers": lambda: with_transformers(theirs, prompts, length),
        "jshard": lambda: ours(prompts, **options),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    tokens = {name: run() for name, run in runs.items()}  # compiles
    equal = sum(a == b for a, b in zip(*tokens.values(), strict=True))
    many = batch * length if length > 1 else sum(map(len, prompts))
    what = f"texts of {length} tokens" if length > 1 else f"tokens after {LONG}"
    print(f"batch {batch}: {equal} of {batch} {what} are equal")
    for _ in range(count):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"  {name:<12} {many / min(seconds):7.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()

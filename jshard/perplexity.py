"""Measures a model on a text: `python -m jshard.perplexity --model=M --text=FILE`."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.inference.generation.prompts import context_length, is_encoder_decoder
from jshard.inference.generation.scoring import scores
from jshard.inference.generation.weight_placement import Placement, sharded
from jshard.inference.trained.model_command import MODEL_OPTIONS, started
from jshard.system.cli.command import read_text, run_command
from jshard.system.cli.options import Command, Option
from jshard.system.cli.terminal import show
from jshard.system.errors import UserError

_COUNT: dict[str, Any] = {"kind": int, "at_least": 1, "at_most": 10**9}
COMMAND = Command(
    "perplexity",
    "Measures how well a trained model predicts a text.",
    {
        **MODEL_OPTIONS,
        "text": Option(None, "a text file", kind=Path, required=True, shown="FILE"),
        "context": Option(
            None, "tokens per window; by default the model's context", **_COUNT
        ),
        "stride": Option(
            None, "tokens by which the window moves; by default half a window",
            **_COUNT,
        ),
    },
)  # fmt: skip


def main() -> None:
    """Runs the command line; exits 0 done, 2 bad input, 130 Ctrl-C, 1 anything else."""
    run_command(run_perplexity)


def run_perplexity(argv: list[str]) -> None:
    """Measures the model on the text that the arguments name."""
    arguments = COMMAND.parse(argv)
    text = read_text("--text", arguments.text)
    with started(arguments) as model:
        tokens = model.tokenizer(arguments.tokenizer).encode(text)
        if len(tokens) < 2:
            raise UserError(
                f"--text={arguments.text}: has {len(tokens)} tokens; needs at least 2"
            )
        abstract = model.abstract()  # before weights are read
        if is_encoder_decoder(abstract):
            raise UserError(
                f"{model.path}: {type(abstract).__name__} is an encoder-decoder, which "
                "predicts one text from another; a run's eval_loss says how well"
            )
        longest = context_length(abstract)
        context = arguments.context or longest
        if context > longest:
            raise UserError(
                f"--context={context}: the model's context is {longest} tokens"
            )
        context = min(context, len(tokens) - 1)
        stride = arguments.stride or max(context // 2, 1)
        if stride > context:
            raise UserError(
                f"--stride={stride}: must be at most the {context} tokens of a window"
            )
        placement = sharded(*model.load(jax.devices()))
        nats = mean_nats(placement, tokens, context, stride)
        if jax.process_index() == 0:
            _print(nats, len(tokens) - 1, context, stride)


def _print(nats: float, scored: int, context: int, stride: int) -> None:
    perplexity = math.exp(nats)
    show(f"{nats:.6f} nats per token, perplexity {perplexity:.4f}: {scored:,} tokens")
    if scored > context:
        show(
            f"in windows of {context} tokens, {stride} apart: all tokens but the first "
            f"{context} are predicted from {context - stride} or more before them"
        )


def mean_nats(
    placement: Placement, tokens: np.ndarray, context: int, stride: int
) -> float:
    """Returns the mean of -log p of all tokens but the first, each predicted once."""
    texts = windows(tokens, context, stride)
    parts = scores(placement, texts, batch_size=placement.devices)
    return -sum(score.log_p for part in parts for _, score in part) / (len(tokens) - 1)


def windows(
    tokens: np.ndarray, context: int, stride: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens of each window that were predicted, and those that are new.

    The model reads ``context`` tokens of a window. This is the sliding window of
    transformers' page on perplexity.
    """
    found, new = [], 1  # the first token is not predicted
    for start in range(0, len(tokens) - 1, stride):
        end = start + context + 1
        found.append((tokens[start:new], tokens[new:end]))
        new = end
        if end >= len(tokens):
            break
    return found


if __name__ == "__main__":
    main()

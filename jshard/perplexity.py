"""Measures a model on a text: `python -m jshard.perplexity --model=M --text=FILE`."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard.cli.command import read_text, run_command
from jshard.cli.options import Command, Option
from jshard.cli.terminal import show
from jshard.errors import UserError
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.state import TrainState
from jshard.generation.prompts import context_length, is_encoder_decoder
from jshard.nn.loss import Mean
from jshard.trained.model_command import MODEL_OPTIONS, started

_COUNT: dict[str, Any] = {"kind": int, "at_least": 1, "at_most": 10**9}
COMMAND = Command(
    "perplexity",
    "Measures how well a trained model predicts a text.",
    {
        **MODEL_OPTIONS,
        "text": Option(None, "a text file", kind=Path, required=True, shown="FILE"),
        "context": Option(
            None, "tokens of a window; by default the model's context", **_COUNT
        ),
        "stride": Option(
            None, "tokens from one window to the next; by default half a window",
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
        fsdp, state = model.load(jax.devices())
        nats = mean_nats(fsdp, state, tokens, context, stride)
        if jax.process_index() == 0:
            _print(nats, len(tokens) - 1, context, stride)


def _print(nats: float, scored: int, context: int, stride: int) -> None:
    show(f"{nats:.6f} nats a token, perplexity {math.exp(nats):.4f}: {scored:,} tokens")
    if scored > context:
        show(
            f"in windows of {context} tokens, {stride} apart: all tokens but the first "
            f"{context} are predicted from {context - stride} or more before them"
        )


def mean_nats(
    fsdp: FSDP,
    state: TrainState,
    tokens: np.ndarray,
    context: int,
    stride: int,
) -> float:
    """Returns the mean of -log p of all tokens but the first, each predicted once."""
    eval_step = fsdp.eval_step(_loss)
    total: Any = 0
    process, count = jax.process_index(), jax.process_count()
    for rows in _batches(windows(tokens, context, stride), fsdp.mesh.size):
        batch = {name: row[process::count] for name, row in rows.items()}
        total = total + eval_step(state, fsdp.shard_batch(batch))
    return total.compute()["loss"]


def windows(
    tokens: np.ndarray, context: int, stride: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields windows of ``context`` tokens, of which those count that are new.

    This is the sliding window of transformers' page on perplexity.
    """
    counted = 0  # targets of earlier windows
    for start in range(0, len(tokens) - 1, stride):
        part = tokens[start : start + context + 1]
        target = start + np.arange(context)
        row = {name: np.zeros(context, np.int32) for name in ("inputs", "targets")}
        row["inputs"][: len(part) - 1] = part[:-1]
        row["targets"][: len(part) - 1] = part[1:]
        new = (target >= counted) & (target < len(tokens) - 1)
        yield row | {"weights": new.astype(np.float32)}
        counted = start + context
        if counted >= len(tokens) - 1:
            return


def _batches(
    rows: Iterator[dict[str, np.ndarray]], size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields ``size`` rows at a time, with rows that count nothing at the end."""
    batch: list[dict[str, np.ndarray]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield {name: np.stack([row[name] for row in batch]) for name in row}
            batch = []
    if batch:
        empty = {name: np.zeros_like(value) for name, value in batch[0].items()}
        batch += [empty] * (size - len(batch))
        yield {name: np.stack([row[name] for row in batch]) for name in empty}


def _loss(model: Any, batch: dict[str, jax.Array]) -> Mean:
    # Not model.loss: a mixture of experts adds other terms to it.
    logits_BTV = model(batch["inputs"])
    log_p_BTV = jax.nn.log_softmax(logits_BTV)
    log_p_BT = jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], -1)[..., 0]
    weights_BT = batch["weights"]
    return Mean(-jnp.sum(log_p_BT * weights_BT), jnp.sum(weights_BT))


if __name__ == "__main__":
    main()

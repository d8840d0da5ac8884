"""Evaluations and samples, traced before the first step to find mistakes early."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jshard.config.run_config import Config
from jshard.data.batches import eval_batches
from jshard.errors import RunFailed, UserError
from jshard.formatting import did_you_mean, printable
from jshard.fsdp.fsdp import FSDP
from jshard.fsdp.state import TrainState


def prepare_evaluation(
    loss_fn: Callable,
    fsdp: FSDP,
    abstract_state: TrainState,
    data: Any,
    config: Config,
    reader: Mapping[str, int],
    steps: dict[Any, Any] | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Makes a recipe's evaluation, and traces it without computing anything.

    `reader` holds the arguments of `eval_batches` that select this process's part, and
    `steps` evaluation steps that were made before, by their loss.

    Returns:
      A function from a state to the means over all examples: `eval_loss` and so on,
      and `eval_ema_loss` and so on if the state has averaged parameters.

    Raises:
      UserError: The data cannot be evaluated on, or `checkpoint.best` names none of
        the means.
    """
    steps = {} if steps is None else steps
    if loss_fn not in steps:
        steps[loss_fn] = fsdp.eval_step(loss_fn)
    eval_step = steps[loss_fn]
    limit = config.eval_batches or None

    def evaluate(state: TrainState) -> dict[str, float]:
        states = {"eval": state}
        if state.ema is not None:
            states["eval_ema"] = state.with_ema_params()
        values = {}
        for prefix, state in states.items():
            total: Any = 0
            for factor, batch in eval_batches(data, max_batches=limit, **reader):
                previous = total
                means = eval_step(state, fsdp.shard_batch(batch))
                total = total + (means if factor == 1 else means.scaled(factor))
                jax.block_until_ready(previous)  # run one batch ahead, as in training
            means = total.compute()
            values |= {f"{prefix}_{name}": value for name, value in means.items()}
            if not total.counted():
                raise RunFailed(
                    f"{prefix}_loss counts nothing: the counts of all its Means are 0; "
                    "look at what loss_fn counts, and at weights in the validation data"
                )
        return values

    first = eval_batches(data, max_batches=limit, num_threads=0, **reader)
    batch = fsdp.shard_batch(next(first)[1])
    means = jax.eval_shape(eval_step, abstract_state, batch)
    prefixes = ["eval"] if abstract_state.ema is None else ["eval", "eval_ema"]
    names = [f"{p}_{name}" for p in prefixes for name in ("loss", *means.metrics)]
    best = config.checkpoint.best
    if best and best not in names:
        raise UserError(
            f"--config.checkpoint.best={best}: evaluations have no such metric; they "
            f"have {', '.join(names)}{did_you_mean(best, names)}"
        )
    return evaluate


def prepare_sample(
    generate: Callable,
    prompts: Any,
    decode: Callable,
    fsdp: FSDP,
    abstract_state: TrainState,
) -> Callable[[TrainState], str]:
    """Makes a recipe's sampling, and traces it without computing anything.

    `generate`, `prompts` and `decode` are what the recipe's `sample` returns.

    Returns:
      A function from a state to the text generated for the first prompt.
    """
    local_devices = fsdp.mesh.size // jax.process_count()

    def fill_devices(rows: np.ndarray) -> np.ndarray:
        count = -(-len(rows) // local_devices) * local_devices
        return np.resize(rows, (count, *rows.shape[1:]))  # repeats rows

    predict_step = fsdp.predict_step(generate)
    batch = fsdp.shard_examples(jax.tree.map(fill_devices, prompts))
    jax.eval_shape(predict_step, abstract_state, batch)

    def sample(state: TrainState) -> str:
        tokens = predict_step(state, batch)
        text = decode(np.asarray(tokens.addressable_shards[0].data)[0])
        # A barely trained model may generate control sequences of the terminal.
        return printable(text)

    return sample

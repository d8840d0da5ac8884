"""Predictions: a row for each example, in order, on any number of devices."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import jax
import numpy as np

from jshard.data.batches import complete
from jshard.data.dataset import Dataset
from jshard.data.examples import count_rows, stack
from jshard.data.iterables import Stream
from jshard.data.stream_reader import PartReader
from jshard.sharding.layout.batch import rows_of_process
from jshard.system.errors import UserError
from jshard.training.prepared_run import PreparedRun


def predict_inputs(model: Any, batch: Any) -> Any:
    """Calls the model with the inputs of a batch: what `predict` does by default."""
    if isinstance(batch, Mapping):
        if "inputs" not in batch:
            raise UserError(
                "predict: examples have no 'inputs', but "
                f"{', '.join(map(repr, batch))}: give fn(model, batch), or predict_fn "
                "in the recipe"
            )
        return model(batch["inputs"])
    return model(batch[0] if isinstance(batch, tuple) else batch)


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, with a UserError if it does not return a row for each example."""

    @functools.wraps(fn)
    def rows(model: Any, batch: Any, **rngs: Any) -> Any:
        outputs, count = fn(model, batch, **rngs), count_rows(batch)
        for path, x in jax.tree_util.tree_leaves_with_path(outputs):
            if np.shape(x)[:1] != (count,):
                raise UserError(
                    f"predict: output{jax.tree_util.keystr(path)} of shape "
                    f"{np.shape(x)} has no row for each of a device's {count} "
                    "examples"
                )
        return outputs

    return rows


def predictions(
    run: PreparedRun, state: Any, predict_step: Callable[[Any, Any], Any], data: Dataset
) -> Iterator[Any]:
    """Yields outputs batch by batch, as NumPy arrays with this process's rows.

    Process p of P has the p-th part of the examples, so that all parts one after the
    other are in the order of the data.

    Raises:
      UserError: There are no examples, or several processes share a stream.
    """
    devices, processes = run.job.fsdp.mesh.size, jax.process_count()
    size = -(-run.settings.batch_size // devices) * devices // processes
    waiting: Any = None
    part = rows_of_process(run.job.fsdp.mesh, whole=True)
    for batch, count in _batches(data, size, *part):
        outputs = predict_step(state, run.job.fsdp.shard_examples(batch))
        if waiting is not None:  # one batch ahead of what is fetched
            yield _fetched(*waiting)
        waiting = outputs, count
    if waiting is None:
        raise UserError("predict: the data have no examples")
    yield _fetched(*waiting)


def _batches(
    data: Dataset, size: int, index: int, processes: int
) -> Iterator[tuple[Any, int]]:
    """Yields full batches of this process, and how many of their rows count."""
    if isinstance(data, Stream):
        if processes > 1:
            raise UserError(
                f"predict: {data.kind} cannot be divided over processes: give data "
                "with items by number"
            )
        for batch in PartReader(data.cursor(0, 1), size):
            count = count_rows(batch)
            rows = np.minimum(np.arange(size), count - 1)  # repeats the last
            yield jax.tree.map(lambda x, rows=rows: x[rows], batch), count
        return
    if len(data) == sys.maxsize:
        raise UserError("predict: the data are endless: leave out .repeat()")
    per_process = -(-len(data) // processes)
    first, last = index * per_process, len(data) - 1
    steps = -(-per_process // size)
    padded = grain.MapDataset.range(steps * size).map(
        lambda i: data[min(first + i, last)]
    )
    own = max(0, min(per_process, len(data) - first))
    batches = padded.batch(size, batch_fn=stack).to_iter_dataset()
    for step, batch in enumerate(complete(iter(batches), steps)):
        yield batch, max(0, min(size, own - step * size))


def _fetched(outputs: Any, count: int) -> Any:
    """Returns the first rows of this process, which need not hold the others."""

    def fetch(x: jax.Array) -> np.ndarray:
        shards = {shard.index[0].start or 0: shard for shard in x.addressable_shards}
        parts = [np.asarray(shards[start].data) for start in sorted(shards)]
        return np.concatenate(parts)[:count]

    return jax.tree.map(fetch, outputs)

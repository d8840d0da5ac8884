"""Batches of a dataset: the part of one process, as a pure function of the step."""

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from jshard.data.dataset import Dataset
from jshard.data.examples import count_rows, stack
from jshard.data.iterables import Stream
from jshard.data.stream_reader import PartReader, StreamReader, StreamState
from jshard.sharding.layout.batch import nearest
from jshard.system.errors import UserError

# Decoding of images keeps every core busy; what is read does not depend on the number.
_THREADS = max(4, os.cpu_count() or 1)
_PREFETCHED = max(8, _THREADS)  # batches
# Seconds at the end of a run: for what is being read, and for processes to end, which
# Grain kills after 25.
_PATIENCE = (5.0, 30.0)


def batches(
    dataset: Dataset,
    *,
    batch_size: int,
    start_step: int,
    num_steps: int,
    first_example: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    num_threads: int = _THREADS,
) -> grain.DatasetIterator:
    """Iterates over this process's part of global batches start_step..num_steps-1.

    Global batch s is examples [s*B, (s+1)*B) of `dataset`, and process p of P reads its
    rows [p*B/P, (p+1)*B/P). A step's batch therefore depends neither on where the run
    started nor on the number of processes. If steps before had another batch size, the
    batches follow on `first_example`.

    Args:
      dataset: Examples, trees of numpy arrays. Training data ends with `.repeat()`;
        finite data must have enough examples for `num_steps`. Of a `Stream`, each
        process reads its parts; see `stream_reader`.
      batch_size: B, the global batch size, a multiple of `process_count`.
      start_step: The first step, counted from 0.
      num_steps: The step after the last.
      first_example: How many examples the steps before `start_step` have read; by
        default `start_step * B`.
      process_index: p.
      process_count: P.
      num_threads: Threads that make batches ahead of time, one for a `Stream`; 0 makes
        them on demand.

    Returns:
      An iterator over trees like the examples, with leaves stacked to [B/P, ...].

    Raises:
      UserError: `dataset` has too few examples, its examples differ, or the batch size
        is not a multiple of the processes.
    """
    _check(batch_size, process_index, process_count)
    if start_step < 0:
        raise UserError(f"start_step={start_step}: steps are counted from 0")
    if isinstance(dataset, Stream):
        reader = StreamReader(
            dataset,
            batch_size=batch_size,
            start_step=start_step,
            num_steps=num_steps,
            first_example=first_example,
            process_index=process_index,
            process_count=process_count,
        )
        return _read_ahead(reader, _PREFETCHED if num_threads else 0)
    first = start_step * batch_size if first_example is None else first_example
    end = first + max(num_steps - start_step, 0) * batch_size
    if len(dataset) < end:
        raise UserError(
            f"the dataset ends after {len(dataset)} examples, but {num_steps} steps of "
            f"{batch_size} need {end}: end make_data with .repeat()"
        )
    # In batches of B/P examples, P of them, one for each process, are a global batch.
    size = batch_size // process_count
    local = dataset[first:end].batch(size, drop_remainder=True, batch_fn=stack)
    local = local[process_index::process_count]
    return iter(local.to_iter_dataset(grain.ReadOptions(num_threads, _PREFETCHED)))


class Batch(NamedTuple):
    """What a step trains on."""

    rows: Any  # this process's rows, a tree of arrays [B/P, ...]
    state: StreamState | None  # where the stream is after it; None for other data
    waited: float  # seconds until it was there


class TrainingBatches(Iterator[Batch]):
    """The batches of a run, each with the state that goes with it.

    Args:
      dataset: The training data.
      state: Of a `Stream`, before `start_step`; None reads it from its start.
      **options: Those of `batches`.

    Attributes:
      first: The first batch, which is read at once.
    """

    def __init__(self, dataset: Dataset, state: StreamState | None, **options: int):
        self._streams = isinstance(dataset, Stream)
        if isinstance(dataset, Stream):
            reader = StreamReader(dataset, state, **options)
            read: list[Any] = [_read_ahead(reader, _PREFETCHED), reader]
        else:
            read = [batches(dataset, **options)]
        # Grain's iterators end their threads when they are deleted, and fail to once
        # Python has taken its modules apart.
        self._read = read
        self._left = options["num_steps"] - options["start_step"]
        weakref.finalize(self, self._read.clear)
        self.first = self._next()
        self._is_first = True

    def __next__(self) -> Batch:
        """Returns the next batch."""
        if self._is_first:
            self._is_first = False
            return self.first
        return self._next()

    def _next(self) -> Batch:
        read = self._read[0]
        began = time.perf_counter()
        if not self._left:
            raise StopIteration
        (rows,) = complete(read, 1)
        self._left -= 1
        waited = time.perf_counter() - began
        return Batch(rows, read.get_state() if self._streams else None, waited)

    def close(self) -> None:
        """Ends the threads that read ahead, and a source's processes after them.

        A source that hangs is left behind.
        """
        for read, patience in zip(self._read, _PATIENCE, strict=False):
            ending = threading.Thread(target=read.close, daemon=True)
            ending.start()
            ending.join(patience)
            if ending.is_alive():
                break
        self._read.clear()


class EvalBatch(NamedTuple):
    """What a step evaluates on."""

    rows: Any  # this process's rows, a tree of arrays
    examples: int | None  # how many of the global batch count, the first; None is all


def eval_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    devices: int = 1,
    max_batches: int | None = None,
    num_threads: int = _THREADS,
    **process: int,
) -> Iterator[EvalBatch]:
    """Iterates once, in order, over this process's part of all examples.

    All processes get the same number of batches. If `batch_size` does not divide the
    number of examples, the last batch is a smaller multiple of `devices`. What is left
    then is a batch of an example for each device, of which `examples` says how many
    count: copies of the last one fill it up.

    Args:
      dataset: Finite; examples are trees of numpy arrays.
      batch_size: B, the global batch size, a multiple of `devices`.
      devices: Over how many the examples of a batch are split, a multiple of
        `process_count`.
      max_batches: The most examples to read, in batches of B; None reads all.
      num_threads: As in `batches`.
      **process: `process_index` and `process_count`, as in `batches`.

    Raises:
      UserError: `dataset` is None, empty or infinite, or the batch size is not a
        multiple of the processes.
    """
    _check(batch_size, **process)
    if dataset is None:
        raise UserError(
            "make_data returned None for split 'validation': return a dataset, or "
            "train without evaluations by --config.eval_every=0"
        )
    if isinstance(dataset, Stream):
        of_all = _of_stream(dataset, batch_size, devices, max_batches)
        return (EvalBatch(_rows(rows, **process), some) for rows, some in of_all)
    num_examples = len(dataset)
    if num_examples == 0:
        raise UserError("the evaluation dataset has no examples: check data.path")
    if num_examples == sys.maxsize:
        raise UserError(
            "the evaluation dataset is infinite: leave out .repeat() in make_data "
            "when split is 'validation'"
        )
    if max_batches is not None and max_batches < 1:
        raise UserError(f"max_batches={max_batches}: give 1 or more, or None for all")
    full = min(num_examples // batch_size, max_batches or sys.maxsize)

    def read(first: int, size: int, count: int) -> Iterator[Any]:
        rows = batches(
            _filled_up(dataset, first + size * count),
            batch_size=size,
            start_step=0,
            num_steps=count,
            first_example=first,
            num_threads=num_threads,
            **process,
        )
        return complete(rows, count)

    def last() -> Iterator[EvalBatch]:
        first = full * batch_size
        for size, examples in last_sizes(dataset, batch_size, devices, max_batches):
            (rows,) = read(first, size, 1)
            yield EvalBatch(rows, examples)
            first += size

    whole = read(0, batch_size, full) if full else ()
    return itertools.chain((EvalBatch(rows, None) for rows in whole), last())


def last_sizes(
    dataset: Dataset, batch_size: int, devices: int, max_batches: int | None
) -> Iterator[tuple[int, int | None]]:
    """Yields the sizes of the batches after the full ones, and how many count of each.

    Those of a `Stream`, which has no length, are not known before.
    """
    if not isinstance(dataset, Stream) and (
        max_batches is None or len(dataset) < batch_size * max_batches
    ):
        yield from _of_rest(len(dataset) % batch_size, devices)


def _of_rest(count: int, devices: int) -> Iterator[tuple[int, int | None]]:
    if whole := count // devices * devices:
        yield whole, None
    if left := count % devices:
        yield devices, left


def complete(read: Iterator[Any], count: int) -> Iterator[Any]:
    """Yields so many batches, which are there.

    Raises:
      RuntimeError: Its end comes before: a StopIteration of the user's own code, which
        would end the data in silence, and in one process of several (as in PEP 479).
    """
    for _ in range(count):
        try:
            batch = next(read)
        except StopIteration as error:
            cause = RuntimeError("StopIteration was raised before the end of the data")
            raise cause.with_traceback(error.__traceback__) from None
        yield batch


def _read_ahead(reader: StreamReader, count: int) -> grain.DatasetIterator:
    """Reads batches in a thread, each with the state after it."""
    return grain.experimental.ThreadPrefetchDatasetIterator(reader, count)


def _of_stream(
    stream: Stream, batch_size: int, devices: int, max_batches: int | None
) -> Iterator[EvalBatch]:
    """Yields a finite stream's global batches, as `eval_batches` does."""
    with contextlib.closing(PartReader(stream.cursor(0, 1), batch_size)) as whole:
        for batch in itertools.islice(whole, max_batches):
            if (count := count_rows(batch)) == batch_size:
                yield EvalBatch(batch, None)
                continue
            first = 0
            for size, examples in _of_rest(count, devices):
                rows = np.minimum(np.arange(first, first + size), count - 1)
                yield EvalBatch(jax.tree.map(lambda x, i=rows: x[i], batch), examples)
                first += size


def _rows(batch: Any, process_index: int = 0, process_count: int = 1) -> Any:
    """Returns this process's rows of a global batch."""
    size = count_rows(batch) // process_count
    rows = slice(process_index * size, (process_index + 1) * size)
    return jax.tree.map(lambda x: x[rows], batch)


def _filled_up(dataset: grain.MapDataset, length: int) -> grain.MapDataset:
    """Returns a dataset of at least this length: copies of the last one are added."""
    last = len(dataset) - 1
    if length <= last + 1:
        return dataset
    return grain.MapDataset.range(length).map(lambda i: dataset[min(i, last)])


def _check(batch_size: int, process_index: int = 0, process_count: int = 1) -> None:
    if not 0 <= process_index < process_count:
        raise ValueError(f"{process_index=} is not in [0, {process_count=})")
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"batch_size={batch_size} is not divisible by {process_count} processes: "
            f"use {nearest(batch_size, process_count)}"
        )

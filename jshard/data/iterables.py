"""Data that can only be read from its start: iterables, generators, DataLoaders.

Grain and everything else with items by number find the batch of a step at once. An
iterable is read in its own order, which is its own affair to shuffle and to repeat
exactly; a run that resumes reads it from the start again and skips what was seen.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np

from jshard.data.examples import count_rows, stack, to_arrays
from jshard.errors import UserError

_NO_SERIES = (Mapping, set, frozenset, str, bytes, tuple)  # of examples, all the same


class Once:
    """An iterator, which can be read once, though looked at before."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator = iterator
        self._looked_at: list[Any] = []
        self._read = False
        self.kind = type(iterator).__name__

    def first(self) -> Iterator[Any]:
        """Returns the first item alone, without taking it away."""
        if not self._looked_at and not self._read:
            self._looked_at = list(itertools.islice(self._iterator, 1))
        return iter(self._looked_at)

    def __iter__(self) -> Iterator[Any]:
        if self._read:
            raise UserError(
                f"data: a {self.kind} can be read once, and it has been read: give a "
                "function that makes it, such as train_data=lambda: rows()"
            )
        self._read = True
        looked_at, self._looked_at = self._looked_at, []
        return itertools.chain(looked_at, self._iterator)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Examples in the order in which an iterable gives them.

    Attributes:
      kind: What it is, in words.
      source: Starts at the beginning each time it is iterated over.
      batched: Whether it gives batches, not examples.
      repeat: Whether to start again at its end.
      loses: What a run on it does without, in words.
    """

    kind: str
    source: Iterable[Any]
    batched: bool
    repeat: bool
    loses: str

    def note(self, split: str) -> str:
        """Says what the start-up note has to say, on one line."""
        return f"{split} is {self.kind}: {self.loses}"

    def first_example(self) -> Any:
        """Returns the first example; an iterator keeps it."""
        source = self.source
        for item in source.first() if isinstance(source, Once) else source:
            tree = _tree(item, self.batched)
            return jax.tree.map(lambda x: x[0], tree) if self.batched else tree
        raise UserError(f"data: {self.kind} has no examples")

    def batches(self, size: int) -> Iterator[Any]:
        """Yields batches of `size` examples; without `repeat` the last may be smaller.

        Raises:
          UserError: There are no examples, or they differ.
        """
        items = self._items()
        return _cut(items, size) if self.batched else _stacked(items, size)

    def _items(self) -> Iterator[Any]:
        for epoch in itertools.count():
            item = None
            for item in self.source:
                yield _tree(item, self.batched)
            if item is None:
                again = " when it is read again" if epoch else ""
                raise UserError(f"data: {self.kind} has no examples{again}")
            if not self.repeat:
                return


def as_stream(data: Any, *, repeat: bool) -> Stream | None:
    """Makes a stream of an iterable without items by number; None of other objects.

    A function without arguments makes the iterable each time it is read. PyTorch's
    `DataLoader` gives batches, of any size; everything else examples.

    Raises:
      UserError: It cannot be read as often as needed, or gives each process other
        examples.
    """
    if isinstance(data, (*_NO_SERIES, type)):
        return None
    loader, iterable = _of_torch(data, "DataLoader"), _of_torch(data, "IterableDataset")
    if has_items(data) and not loader and not iterable:
        return None
    again = "a run that resumes reads it from the start and skips what it has seen"
    if callable(data) and not hasattr(data, "__iter__"):
        name, make = getattr(data, "__name__", type(data).__name__), cast(Any, data)
        return Stream(
            f"what {name}() makes", _Made(make), False, repeat, f"in its order; {again}"
        )
    if not isinstance(data, Iterable):
        return None
    kind = f"a {type(data).__name__}"
    if isinstance(data, Once | Iterator):
        once = data if isinstance(data, Once) else Once(data)
        kind = f"a {once.kind}"
        if not repeat:
            raise UserError(
                f"data: {kind} can be read once, and evaluations read it each time: "
                "give a list, or a function that makes it"
            )
        loses = f"in its order, once, without a second epoch; {again}, if it is new"
        return Stream(kind, once, False, False, loses)
    loses = f"in its own order; {again}"
    if loader:
        _check_sampler(data)
        kind = "a DataLoader of PyTorch"
        if _shuffles_unseeded(data):
            loses += (
                ", in another order, as it shuffles without a generator; give it one, "
                "or its dataset instead of it"
            )
    return Stream(kind, data, loader, repeat, loses)


def has_items(data: Any) -> bool:
    """Returns whether an object has examples by number, as lists do."""
    numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return numbered and not isinstance(data, _NO_SERIES)


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a function makes, each time it is iterated over."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def _of_torch(data: Any, name: str) -> bool:
    """Returns whether an object is of a class of `torch.utils.data`."""
    torch: Any = sys.modules.get("torch.utils.data")  # else it cannot be
    return torch is not None and isinstance(data, getattr(torch, name))


def _check_sampler(loader: Any) -> None:
    if getattr(loader.sampler, "num_replicas", 1) > 1:
        raise UserError(
            "data: the DataLoader has a DistributedSampler, which gives each process "
            "other examples: leave it out, each process takes its rows of a batch"
        )
    if jax.process_count() > 1 and _shuffles_unseeded(loader):
        raise UserError(
            "data: the DataLoader shuffles without a generator, so that processes see "
            "other batches: give generator=torch.Generator().manual_seed(0)"
        )


def _shuffles_unseeded(loader: Any) -> bool:
    sampler = loader.sampler
    random = type(sampler).__name__ == "RandomSampler"
    return random and sampler.generator is None and loader.generator is None


def _tree(item: Any, batched: bool) -> Any:
    """Returns an item as arrays; PyTorch's collation makes lists of tuples."""
    if batched and isinstance(item, list):
        item = tuple(item)
    return to_arrays(item)


def _stacked(examples: Iterator[Any], size: int) -> Iterator[Any]:
    while some := list(itertools.islice(examples, size)):
        yield stack(some)


def _cut(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Joins and cuts batches to ones of `size` examples."""
    waiting: list[Any] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += count_rows(batch)
        while count >= size:
            whole = _joined(waiting)
            yield jax.tree.map(lambda x: x[:size], whole)
            count -= size
            waiting = [jax.tree.map(lambda x: x[size:], whole)] if count else []
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    try:
        return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    except ValueError as error:
        raise UserError(
            "data: batches differ in structure or shapes, and cannot be joined to "
            f"batch_size: {' '.join(str(error).split())}"
        ) from error

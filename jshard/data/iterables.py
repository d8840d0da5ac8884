"""Streams: data that are read in their own order, not by number.

Grain's map-style datasets and everything else with items by number find the batch of a
step at once. A stream's order is its own affair. How a batch and the stream's state get
from here to a checkpoint: a `Cursor` (places.py) reads one part of a stream, a
`StreamReader` (stream_reader.py) makes a process's rows of each batch of what its parts
give, and the state after each batch travels with the batch (batches.py), until a
checkpoint stores that of the newest step (stream_state.py).
"""

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax

from jshard.data.fingerprint import fingerprint, is_huggingface
from jshard.data.places import Cursor, is_torch, state_methods
from jshard.system.compat.data_loaders import is_sharded_loader, is_split_by_node
from jshard.system.errors import UserError

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
      open_part: From p and n to the p-th of n parts, to be read from its beginning.
      divides: Whether it can be read in parts; if not, n is 1.
      repeat: Whether to start again at its end.
      loses: What a run on it does without, in words; empty for nothing.
      fingerprint: What is known of its data, see `fingerprint`.
    """

    kind: str
    open_part: Callable[[int, int], Any]
    divides: bool
    repeat: bool
    loses: str = ""
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def cursor(self, part: int, parts: int) -> Cursor:
        """Returns the beginning of a part."""
        return Cursor(
            self.kind, lambda: self.open_part(part, parts), repeat=self.repeat
        )


def as_stream(data: Any, *, repeat: bool) -> Stream | None:
    """Makes a stream of an iterable without items by number; None of other objects.

    A function makes the iterable each time it is read: of everything if it takes no
    arguments, and of the part p of n if it takes these two. An `IterableDataset` of
    Hugging Face is divided, too. PyTorch's loaders give batches, of any size;
    everything else examples.

    Raises:
      UserError: It cannot be read as often as needed, or gives each process other
        examples.
    """
    if isinstance(data, (*_NO_SERIES, type)):
        return None
    loader, iterable = is_torch(data, "DataLoader"), is_torch(data, "IterableDataset")
    if has_items(data) and not loader and not iterable:
        return None
    if callable(data) and not hasattr(data, "__iter__"):
        return _of_function(data, repeat)
    if not isinstance(data, Iterable):
        return None
    kind = _kind(data)
    known = fingerprint(data)
    if is_huggingface(data):
        if is_split_by_node(data):
            raise UserError(
                "data: the IterableDataset was given to split_dataset_by_node: leave "
                "that out, each process reads its part of it"
            )
        read = lambda p, n: part_of(data, p, n)
        return Stream(kind, read, True, repeat, fingerprint=known)
    if isinstance(data, Once | Iterator):
        return _of_iterator(data, repeat)
    if is_sharded_loader(data):
        raise UserError(
            "data: the DataLoader of Grain gives each process other examples: give "
            "NoSharding() for its shards, or a function (part, parts) that makes it"
        )
    loses = ""
    if loader:
        _check_sampler(data)
        kind = f"{_kind(data)} of PyTorch"
        if _shuffles_unseeded(data):
            loses = (
                "in another order, as it shuffles without a generator; give it one, "
                "or its dataset instead of it"
            )
    return Stream(kind, lambda p, n: data, False, repeat, loses, known)


def has_items(data: Any) -> bool:
    """Returns whether an object has examples by number, as lists do."""
    numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    return numbered and not isinstance(data, _NO_SERIES)


def part_of(dataset: Any, part: int, parts: int) -> Any:
    """Returns a part of an `IterableDataset` of Hugging Face.

    With at least as many files as parts, a part is every n-th file, and no other is
    read. With fewer, it is every n-th example, and each process reads all files.
    """
    if dataset.num_shards >= parts:
        return dataset.shard(parts, part, contiguous=False)
    from datasets.distributed import (  # pyright: ignore[reportMissingImports]
        split_dataset_by_node,
    )

    own = dataset.shard(1, 0)  # what reads a dataset keeps its state in it
    return split_dataset_by_node(own, part, parts)


def _kind(data: Any) -> str:
    name = type(data).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _of_function(make: Any, repeat: bool) -> Stream:
    name = getattr(make, "__name__", type(make).__name__)
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # one of C, without a signature
        parameters = ()
    positional = [
        x for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)
    ]
    needed = [x.name for x in positional if x.default is x.empty]
    if len(needed) not in (0, 2):
        raise UserError(
            f"data: {name}({', '.join(needed)}) must take no arguments, or two: the "
            "number of the part that it makes, from 0, and that of all parts"
        )
    open_part = make if needed else lambda p, n: make()
    return Stream(f"what {name}() makes", open_part, bool(needed), repeat)


def _of_iterator(data: Once | Iterator[Any], repeat: bool) -> Stream:
    """Returns the stream of what is read once, or can be set back to its start."""
    methods = state_methods(data)
    if methods:
        start = copy.deepcopy(methods[0]())

        def rewound(part: int, parts: int) -> Any:
            methods[1](copy.deepcopy(start))
            return data

        return Stream(_kind(data), rewound, False, repeat)
    once = data if isinstance(data, Once) else Once(cast(Iterator[Any], data))
    if not repeat:
        raise UserError(
            f"data: a {once.kind} can be read once, and evaluations read it each time: "
            "give a list, or a function that makes it"
        )
    loses = "once, without a second epoch, if it is new"
    return Stream(f"a {once.kind}", lambda p, n: once, False, False, loses)


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

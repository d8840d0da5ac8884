"""Batches of a stream: a process's rows of each, and the stream's state after it.

A run divides its stream once and for all, into as many parts as it has processes when
it starts, or into one. Part q of n gives rows [q*B/n, (q+1)*B/n) of each global batch.
A process opens the parts that hold its rows: with as many processes as parts each its
own; with fewer several; with more, some parts are opened by several processes, which
each drop the others' rows. A batch therefore does not depend on the number of
processes that a run resumes with, and nothing is repeated or left out.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jshard.data.examples import count_rows, stack, to_arrays
from jshard.data.fingerprint import difference
from jshard.data.iterables import Stream
from jshard.data.places import Cursor
from jshard.system.errors import UserError
from jshard.system.formatting import one_line

_THEN = (
    "resume with the data of the run, or start a new one in another --workdir with "
    "--config.checkpoint.restore"
)


@dataclasses.dataclass(frozen=True)
class StreamState:
    """Where a stream is after a batch.

    Attributes:
      kind: What the stream is, in words.
      parts: Into how many it is divided.
      of_part: The state of each part, by number; a process has some.
      fingerprint: The stream's.
    """

    kind: str
    parts: int
    of_part: Mapping[int, Any]
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)


class PartReader(Iterator[Any]):
    """Batches of `size` examples of a part; the last may be smaller.

    Items that are batches, of any size, are joined and cut. The state after a batch
    that ends within an item is that before the item, and how many rows were used.
    """

    def __init__(self, cursor: Cursor, size: int):
        self._cursor, self._size = cursor, size
        self.resumes = cursor.resumes
        self._rest: Any = None  # of an item
        self._before, self._used = cursor.state(), 0

    def __next__(self) -> Any:
        """Returns the next batch; a UserError if its examples differ."""
        batch = self.read(self._size)
        if batch is None:
            raise StopIteration
        return batch

    def read(self, size: int) -> Any:
        """Returns the next `size` examples, or what is left; None after the last."""
        if not self._cursor.batched:
            items = itertools.islice(self._cursor, size)
            examples = [to_arrays(item) for item in items]
            return stack(examples) if examples else None
        pieces, missing = [], size
        while missing:
            if self._rest is None:
                self._before, self._used = self._cursor.state(), 0
                self._rest = self._next_item()
                if self._rest is None:
                    break
            count = min(missing, count_rows(self._rest))
            pieces.append(jax.tree.map(lambda x, n=count: x[:n], self._rest))
            self._drop(count)
            missing -= count
        return joined(pieces) if pieces else None

    def _next_item(self) -> Any:
        """Returns a batch of the source as arrays; None at its end."""
        for item in self._cursor:
            # PyTorch's collation makes lists of tuples.
            return to_arrays(tuple(item) if isinstance(item, list) else item)
        return None

    def _drop(self, count: int) -> None:
        """Goes on by some rows of the item."""
        self._used += count
        rest = jax.tree.map(lambda x: x[count:], self._rest)
        self._rest = rest if count_rows(rest) else None

    def state(self) -> Any:
        """Returns what `restore` leads back to."""
        if self._rest is None:
            return {"before": self._cursor.state(), "used": 0}
        return {"before": self._before, "used": self._used}

    def restore(self, state: Any) -> None:
        """Goes to where `state` was called."""
        self._cursor.restore(state["before"])
        self._rest = None
        if state["used"]:
            self._rest = self._next_item()
            self._before, self._used = state["before"], 0
            self._drop(state["used"])

    def close(self) -> None:
        """Ends what the part has started to be read."""
        self._cursor.close()


class StreamReader(Iterator[Any]):
    """A process's rows [p*B/P, (p+1)*B/P) of the batches of steps start_step on.

    The arguments are as for `batches`. `state` is that of the last step before
    `start_step`; if it is not known, the stream is read from its start, up to what
    `first_example` says that the steps before have read.

    Attributes:
      resumes: Whether `get_state` leads back; if not, it is None.
      parts: Into how many the stream is divided.

    Raises:
      UserError: The state is another stream's, or the stream refuses it.
    """

    def __init__(
        self,
        stream: Stream,
        state: StreamState | None = None,
        *,
        batch_size: int,
        start_step: int,
        num_steps: int,
        first_example: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ):
        self._kind, self._step, self._steps = stream.kind, start_step, num_steps
        self._fingerprint = stream.fingerprint
        self.parts = process_count if stream.divides else 1
        if state:
            if state.kind != stream.kind:
                raise self._of_another(state.kind)
            if changed := difference(stream.fingerprint, state.fingerprint):
                raise UserError(f"the training data are others: {changed}: {_THEN}")
            self.parts = state.parts
        if batch_size % self.parts:
            raise UserError(
                f"batch_size={batch_size}: the run's data are in {self.parts} parts, "
                "as it was started: give a multiple of that"
            )
        size, rows = batch_size // self.parts, batch_size // process_count
        first = process_index * rows
        mine = range(first // size, (first + rows - 1) // size + 1)
        self._readers = {
            part: PartReader(stream.cursor(part, self.parts), size) for part in mine
        }
        self._size, begin = size, first - mine.start * size
        self._rows = slice(begin, begin + rows)
        self.resumes = all(x.resumes for x in self._readers.values())
        self._restored: StreamState | None = None
        if state and not self.resumes:
            raise self._of_another(f"{state.kind} with a state, which these lack")
        if state:
            self.set_state(state)
        else:
            read = start_step * batch_size if first_example is None else first_example
            self._skip(read)

    def _skip(self, examples: int) -> None:
        """Reads what earlier steps have read: as much of each part."""
        if examples % self.parts:
            raise UserError(
                f"the run has read {examples} examples of {self._kind}, which lacks a "
                f"state, and {self.parts} processes cannot divide them: resume it on "
                "as many processes as it had"
            )
        for reader in self._readers.values():
            left = examples // self.parts
            while left:
                self._read(reader, min(left, self._size))
                left -= min(left, self._size)

    def _read(self, reader: PartReader, size: int) -> Any:
        batch = reader.read(size)
        if batch is None or count_rows(batch) < size:
            raise UserError(
                f"the training data ends in step {self._step + 1} of "
                f"{self._steps}: give data that can be read again, such as a "
                "function that makes it, or lower --config.steps"
            )
        return batch

    def __next__(self) -> Any:
        """Returns the rows of the next step; StopIteration after the last one.

        Raises:
          UserError: The stream ends before that, or the restored state was not its.
        """
        if self._step == self._steps:
            raise StopIteration
        batches = [self._read(x, self._size) for x in self._readers.values()]
        self._step += 1
        if self._restored:
            self._check_restored(self._restored)
            self._restored = None
        return jax.tree.map(lambda x: x[self._rows], joined(batches))

    def get_state(self) -> StreamState | None:
        """Returns where this process's parts are now."""
        if not self.resumes:
            return None
        of_part = {part: reader.state() for part, reader in self._readers.items()}
        return StreamState(self._kind, self.parts, of_part, self._fingerprint)

    def set_state(self, state: StreamState) -> None:
        """Goes to where a state says; a UserError if the stream refuses it."""
        for part, reader in self._readers.items():
            try:
                reader.restore(state.of_part[part])
            except UserError:
                raise
            except Exception as error:  # a library's own, of any type
                why = one_line(f"{type(error).__name__}: {error}")
                found = f"{state.kind}, which they refuse ({why})"
                raise self._of_another(found) from error
        self._restored = state

    def close(self) -> None:
        """Ends what the stream has started to be read, such as processes."""
        for reader in self._readers.values():
            reader.close()

    def _check_restored(self, state: StreamState) -> None:
        """Compares it with the state one step later, which has the same form."""
        for part, reader in self._readers.items():
            one, other = state.of_part[part], reader.state()
            if where := _difference(*(x["before"]["source"] for x in (one, other))):
                raise self._of_another(f"{state.kind} of another form ({where})")

    def _of_another(self, found: str) -> UserError:
        return UserError(
            f"the training data are {self._kind}, but the checkpoint has the state of "
            f"{found}: {_THEN}"
        )


def describe(
    split: str, stream: Stream, state: StreamState | None, processes: int
) -> str:
    """Says how a stream is read, on one line of the start-up note.

    Args:
      split: Its name.
      stream: The stream.
      state: After a batch; None if it has none.
      processes: How many read it.
    """
    parts = state.parts if state else processes if stream.divides else 1
    texts = [f"{split} is {stream.kind}"]
    if parts == processes > 1:
        texts.append("each process reads its part")
    elif parts > 1:
        texts.append(f"in {parts} parts, read by {processes} process(es)")
    elif processes > 1:
        texts.append("each process reads all of it")
    if stream.loses:
        texts.append(stream.loses)
    if state:
        texts.append("a resumed run continues where it stopped")
    else:
        texts.append(
            "without a state: a run that resumes reads it from the start and skips "
            "what it has seen"
        )
    return f"{texts[0]}: {'; '.join(texts[1:])}"


def joined(batches: Sequence[Any]) -> Any:
    """Returns the rows of several batches as one."""
    if len(batches) == 1:
        return batches[0]
    try:
        return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    except ValueError as error:
        raise UserError(
            "data: batches differ in structure or shapes, and cannot be joined to "
            f"batch_size: {one_line(str(error))}"
        ) from error


def _difference(one: Any, other: Any, path: str = "") -> str:
    """Returns where two states have other keys, or other numbers of dicts; or ""."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return (
                f"{path or 'its keys'}: {sorted(map(str, one.keys() ^ other.keys()))}"
            )
        pairs = [(one[key], other[key], f"{path}[{key!r}]") for key in one]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if not any(isinstance(x, Mapping) for x in (*one, *other)):
            return ""
        if len(one) != len(other):
            return f"{path}: {len(one)}, not {len(other)}"
        paths = [f"{path}[{i}]" for i in range(len(one))]
        pairs = list(zip(one, other, paths, strict=True))
    else:
        return ""  # values change, and what is None may be something later
    return next(filter(None, (_difference(*pair) for pair in pairs)), "")

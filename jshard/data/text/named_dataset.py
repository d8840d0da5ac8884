"""Hugging Face's datasets, by name or from folders of files."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grain
from grain.experimental import WindowShuffleIterDataset

from jshard.data.fingerprint import fingerprint, of_files
from jshard.data.iterables import part_of
from jshard.data.places import Cursor
from jshard.storage.hub.online.names import Name, parse
from jshard.system.errors import RunFailed, UserError, some_of
from jshard.system.formatting import one_line

VALIDATION = "validation"  # a dataset's split, and that of a run


class Split(NamedTuple):
    """A split of a dataset."""

    rows: Any  # an `IterableDataset`
    fingerprint: Mapping[str, str]  # what is known of it


@functools.lru_cache(maxsize=16)  # for both splits
def load_splits(dataset: str, config: str) -> Mapping[str, Split]:
    """Returns the splits of a dataset by name, to be streamed.

    The dataset is a name on the Hub, perhaps with a revision, or a folder; `config` is
    its configuration, "" for its only one.

    Raises:
      UserError: There is no such dataset or configuration, or the Hub does not answer.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"data.dataset={dataset}: needs Hugging Face's datasets: pip install "
            "'jshard[datasets]'"
        ) from error
    name = parse(dataset, "stream") or Name(dataset)
    try:
        builder: Any = datasets.load_dataset_builder(
            name.repository,
            config or None,
            data_dir=name.path or None,
            revision=name.commit or name.revision or None,
        )
        splits = builder.as_streaming_dataset()
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data.dataset={dataset}{f', data.config={config}' if config else ''}: "
            f"{one_line(str(error).strip())}"
        ) from error
    except (StopIteration, LookupError) as error:  # what has columns is looked for
        raise UserError(
            f"data.dataset={dataset}: a file that should say its columns is empty; "
            "remove files without rows"
        ) from error
    files = {str(split): x for split, x in (builder.config.data_files or {}).items()}
    return {
        split: Split(rows, fingerprint(rows) | of_files(files.get(split, ())))
        for split, rows in splits.items()
    }


class NamedDataset:
    """The rows of a dataset to train on, and those to validate with.

    Args:
      name: As for `load_splits`.
      config: The same.
      train_split: The split to train on.
      validation_rows: How many rows to validate on, of the split "validation"; if there
        is none, the first ones of the first file with rows, which are not trained on.

    Attributes:
      rows: An `IterableDataset` of the split to train on, with all its rows.
      fingerprint: What is known of it.

    Raises:
      UserError: There is no such dataset, configuration or split.
    """

    def __init__(self, name: str, config: str, train_split: str, validation_rows: int):
        splits = load_splits(name, config)
        if train_split not in splits:
            raise UserError(
                f"data.dataset={name}: has no split {train_split!r}; set data.split to "
                f"one of {some_of(sorted(splits))}"
            )
        self.name = name
        self.rows, known = splits[train_split]
        self.fingerprint = {f"{what} of {name}": text for what, text in known.items()}
        self._own, self._count = splits.get(VALIDATION), validation_rows

    def held_out(self) -> Iterator[Mapping[str, Any]]:
        """Yields the rows to validate with."""
        if self._own:
            return iter(part_of(self._own.rows, 0, 1).take(self._count))
        return iter(
            part_of(self.rows, self._first, self.rows.num_shards).take(self._count)
        )

    @functools.cached_property
    def _first(self) -> int:
        """The first file with rows."""
        files = self.rows.num_shards
        for file in range(files):
            for _ in part_of(self.rows, file, files).take(1):
                return file
        raise UserError(f"data.dataset={self.name}: has no rows")

    def part(
        self,
        part: int,
        parts: int,
        shuffle_rows: int,
        seed: int,
        used: "Used | None" = None,
    ) -> grain.IterDataset:
        """Returns a part of the rows to train on, without an end.

        Args:
          part: From 0.
          parts: How many there are.
          shuffle_rows: How many rows are shuffled at a time; 0 is none.
          seed: Determines their order.
          used: Is told what is read; whoever makes examples tells it what they gave.
        """
        used = used or Used()
        used.shuffled = shuffle_rows
        read: grain.IterDataset = _Rows(
            self.name, lambda: self.trained_part(part, parts), used
        )
        if not shuffle_rows:
            return read
        return WindowShuffleIterDataset(
            read, window_size=shuffle_rows, seed=(seed + part) % 2**31
        )

    def trained_part(self, part: int = 0, parts: int = 1) -> Any:
        """Returns a part of the rows that are not held out, an `IterableDataset`."""
        if self._own or not self._count:
            return part_of(self.rows, part, parts)
        if self.rows.num_shards < parts:  # then each part reads all files
            return part_of(self.rows.skip(self._count), part, parts)
        own = part_of(self.rows, part, parts)
        # The files before the first one with rows have none.
        return own.skip(self._count) if part == self._first % parts else own


class Used:
    """Whether the rows of a part, which is read without an end, are of any use.

    What makes examples of rows says how many each gave. If all rows of an epoch gave
    none, it would read on for ever.

    Attributes:
      shuffled: How many rows are shuffled at a time, and so not in order.
    """

    def __init__(self) -> None:
        self.shuffled = 0
        self._read = self._unused = 0
        self._rows: int | None = None  # of an epoch, once one has ended

    def read(self, epoch: int) -> None:
        """Counts a row that is read, in an epoch from 0 on."""
        if epoch == 0:
            self._read += 1
        elif self._rows is None:
            self._rows = self._read

    def gave(self, name: str, examples: int) -> None:
        """Counts a row that gave some examples; a UserError if all gave none."""
        self._unused = 0 if examples else self._unused + 1
        if self._rows and self._unused > 2 * (self._rows + self.shuffled):
            raise UserError(
                f"data.dataset={name}: no row has a text to train on; set "
                "data.text_key to the column that has"
            )


class _Rows(grain.IterDataset):
    """The rows of a part of a dataset, without an end."""

    def __init__(self, name: str, open_rows: Callable[[], Any], used: Used):
        super().__init__()
        self._name, self._open, self._used = name, open_rows, used

    def __iter__(self) -> grain.DatasetIterator:
        cursor = Cursor(self._name, self._open, repeat=True)
        return _RowIterator(self._name, cursor, self._used)


class _RowIterator(grain.DatasetIterator):
    def __init__(self, name: str, cursor: Cursor, used: Used):
        super().__init__()
        self._name, self._cursor, self._used = name, cursor, used

    def __next__(self) -> Any:
        try:
            row = next(self._cursor)
            self._used.read(self._cursor.epoch)
            return row
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise RunFailed(
                f"data.dataset={self._name}: cannot be read: {one_line(str(error))}"
            ) from error

    def get_state(self) -> Any:
        return self._cursor.state()

    def set_state(self, state: Any) -> None:
        self._cursor.restore(state)

"""Hugging Face's datasets, by name or from folders of files."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grain
from grain.experimental import WindowShuffleIterDataset

from jshard.cli.formatting import one_line
from jshard.data.fingerprint import fingerprint, of_files
from jshard.data.iterables import part_of
from jshard.data.places import Cursor
from jshard.errors import RunFailed, UserError, some_of
from jshard.hub.online.names import Name, parse

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
        is none, the first ones of the first file, which are not trained on.

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
        return iter(part_of(self.rows, 0, self.rows.num_shards).take(self._count))

    def part(
        self, part: int, parts: int, shuffle_rows: int, seed: int
    ) -> grain.IterDataset:
        """Returns a part of the rows to train on, without an end.

        Args:
          part: From 0.
          parts: How many there are.
          shuffle_rows: How many rows are shuffled at a time; 0 is none.
          seed: Determines their order.
        """
        read: grain.IterDataset = _Rows(
            self.name, lambda: self.trained_part(part, parts)
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
        return own if part else own.skip(self._count)


class _Rows(grain.IterDataset):
    """The rows of a part of a dataset, without an end."""

    def __init__(self, name: str, open_rows: Callable[[], Any]):
        super().__init__()
        self._name, self._open = name, open_rows

    def __iter__(self) -> grain.DatasetIterator:
        return _RowIterator(self._name, Cursor(self._name, self._open, repeat=True))


class _RowIterator(grain.DatasetIterator):
    def __init__(self, name: str, cursor: Cursor):
        super().__init__()
        self._name, self._cursor = name, cursor

    def __next__(self) -> Any:
        try:
            return next(self._cursor)
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

"""Hugging Face's datasets, by name or from folders of files."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from jshard.cli.formatting import one_line
from jshard.data.fingerprint import fingerprint, of_files
from jshard.errors import UserError
from jshard.hub.online.names import Name, parse


class Split(NamedTuple):
    """A split of a dataset.

    Attributes:
      rows: An `IterableDataset`.
      fingerprint: What is known of it.
    """

    rows: Any
    fingerprint: Mapping[str, str]


@functools.lru_cache(maxsize=16)  # for both splits
def load_splits(dataset: str, config: str) -> Mapping[str, Split]:
    """Returns the splits of a dataset by name, to be streamed.

    Args:
      dataset: A name on the Hub, which may have a revision, or a folder.
      config: The dataset's configuration; "" for its only one.

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

"""What a recipe computes once for each example, kept in the run's folder."""

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshard.data.batches import batches, complete, eval_batches
from jshard.data.dataset import Dataset
from jshard.data.examples import count_rows
from jshard.data.iterables import Stream
from jshard.recipe.config.settings import RunSettings
from jshard.sharding.layout.batch import rows_of_process
from jshard.sharding.settings.state import TrainState
from jshard.sharding.step.fsdp import FSDP
from jshard.system.errors import UserError
from jshard.system.files.atomic import replacing

FILE = "precomputed.npz"  # in a run's folder
_DIGESTS = "digests"


class Precomputed:
    """Values by example: whatever order the examples come in, each finds its own.

    Args:
      columns: arrays of n values by name, one for each example.
      digests: of the examples without these columns, uint8[n, 16].
    """

    def __init__(self, columns: Mapping[str, np.ndarray], digests: np.ndarray):
        self.columns, self.digests = dict(columns), digests
        self._row = {digest.tobytes(): i for i, digest in enumerate(digests)}

    def fill(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Returns rows of a batch with their values.

        Raises:
          UserError: An example is none of those that were computed.
        """
        digests = digests_of(rows, self.columns)
        if missing := sum(digest not in self._row for digest in digests):
            raise UserError(
                f"{missing} of the {len(digests)} examples of a batch were not there "
                "when the run computed values for its examples, before its first "
                "step: the data have changed, or it has more steps now; start it in a "
                "new folder"
            )
        found = np.asarray([self._row[digest] for digest in digests])
        return {**rows, **{name: x[found] for name, x in self.columns.items()}}

    def save(self, workdir: Path) -> None:
        """Writes it to a run's folder."""
        arrays: dict[str, Any] = {_DIGESTS: self.digests, **self.columns}
        with replacing(workdir / FILE) as file:
            np.savez(file, **arrays)

    @classmethod
    def read(cls, workdir: Path) -> "Precomputed":
        """Reads it from the folder of a run that has begun."""
        file = workdir / FILE
        try:
            with file.open("rb") as stream:
                columns = dict(np.load(stream, allow_pickle=False))
            return cls(columns, columns.pop(_DIGESTS))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{file}: cannot be read ({error}); it has what the run computed "
                "before its first step: put it back, or start in a new folder"
            ) from error


def digests_of(rows: Mapping[str, Any], without: Iterable[str]) -> list[bytes]:
    """Returns a digest of each row of a batch, without some columns."""
    kept = [np.asarray(rows[name]) for name in sorted({*rows} - {*without})]
    return [
        hashlib.blake2b(b"".join(x[i].tobytes() for x in kept), digest_size=16).digest()
        for i in range(count_rows(rows))
    ]


def precompute(
    fn: Callable[[Any, Any], Mapping[str, Any]],
    fsdp: FSDP,
    state: TrainState,
    data: Mapping[str, Dataset | None],
    settings: RunSettings,
) -> Precomputed:
    """Computes the values of all examples that a run reads; all processes call it.

    `fn` is the recipe's, from a model and a batch to values by name.

    Raises:
      UserError: Data are a stream.
    """
    step, part = fsdp.predict_step(fn), rows_of_process(fsdp.mesh, whole=True)
    values: dict[bytes, list] = {}
    names: list[str] = []
    for batch in _all_batches(data, settings):
        rows = _own_rows(batch, fsdp.mesh.size, *part)
        compute = lambda rows=rows: fsdp.fetch(step(state, fsdp.shard_examples(rows)))
        found = None
        if not names:
            found = compute()
            names = sorted(found)
        digests = digests_of(batch, names)
        if all(digest in values for digest in digests):
            continue
        found = found or compute()
        for i, digest in enumerate(digests):
            values.setdefault(digest, [found[name][i] for name in names])
    columns = zip(names, zip(*values.values(), strict=True), strict=True)
    digests = np.asarray([np.frombuffer(x, np.uint8) for x in values])
    return Precomputed({name: np.asarray(x) for name, x in columns}, digests)


def _all_batches(
    data: Mapping[str, Any], settings: RunSettings
) -> Iterator[Mapping[str, Any]]:
    """Yields global batches of all splits, as far as the run reads them."""
    if any(isinstance(x, Stream) for x in data.values()):
        raise UserError(
            "values are computed once for examples that are read again: give make_data "
            "that returns a list or a grain.MapDataset, not a stream"
        )
    size = settings.batch_size
    training = batches(
        data["train"], batch_size=size, start_step=0, num_steps=settings.steps
    )
    yield from complete(training, settings.steps)
    limit = settings.eval_batches or None
    for name, one in data.items():
        if name != "train" and one is not None:
            for batch in eval_batches(one, batch_size=size, max_batches=limit):
                yield batch.rows


def _own_rows(batch: Mapping[str, Any], devices: int, part: int, parts: int) -> Any:
    """Returns a process's rows of a batch, which copies of the last one fill up."""
    count = count_rows(batch)
    size = -(-count // devices) * devices // parts
    rows = np.minimum(np.arange(part * size, (part + 1) * size), count - 1)
    return jax.tree.map(lambda x: x[rows], batch)

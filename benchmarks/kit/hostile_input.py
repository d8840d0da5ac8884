"""Files that are changed at random, and what reading them does; run in a jail."""

import collections
import random
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

from checkpoints import make_state  # pyright: ignore[reportAttributeAccessIssue]
from damage import read_or_refuse
from damaged_files import READERS, _adapted
from hostile_files import MORE_READERS
from jshard.storage.checkpoint import metadata
from jshard.storage.checkpoint.checkpointer import Checkpointer
from jshard.storage.checkpoint.restore import find_damage, restore_state
from jshard.system.errors import UserError


def mutations(names: Sequence[str], count: int, number: int) -> None:
    """Prints for each kind of file how many changed ones were read or refused."""
    for reader in (*READERS, *MORE_READERS):
        kind = reader.__name__.removesuffix("_reader")
        if names and kind not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                file, strategy, read = reader(Path(folder))
            except pytest.skip.Exception as skipped:
                print(f"| {kind} | skipped: {skipped} | |", flush=True)
                continue
            found = _changed(file, strategy, read, count, number)
        wrong = {text: n for text, n in found.items() if text}
        print(f"| {kind} | {found.total()} | {wrong or 0} |", flush=True)


def _changed(
    file: Path, strategy: Any, read: Callable[[], object], count: int, number: int
) -> collections.Counter[str]:
    """Counts what happens: "" where a changed file is read or refused."""
    found: collections.Counter[str] = collections.Counter()

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(strategy)
    def check(content: bytes) -> None:
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        try:
            read_or_refuse(read)
            found[""] += 1
        except Exception as error:  # what is counted
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            found[f"{type(error).__name__} at {place}: {error}"[:200]] += 1

    check()
    return found


def flips(names: Sequence[str], count: int, number: int) -> None:
    """Prints how many flipped bits of a checkpoint were found, or changed nothing."""
    del names
    chance, found = random.Random(number), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        state = make_state(_adapted(), 0)
        want = _values(state)
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(state)
        step = Path(folder, "0")
        files = [x for x in sorted(step.rglob("*")) if x.is_file() and x.stat().st_size]
        for _ in range(count):
            file = chance.choice(files)
            before = file.read_bytes()
            after, bit = bytearray(before), chance.randrange(8 * len(before))
            after[bit // 8] ^= 1 << bit % 8
            file.write_bytes(after)
            try:
                if find_damage(step):
                    found["found"] += 1
                else:
                    same = _values(restore_state(step, _adapted())) == want
                    found["changed nothing" if same else "WRONG"] += 1
            except UserError:
                found["found"] += 1
            except Exception as error:  # what is counted
                found[type(error).__name__] += 1
            finally:
                file.write_bytes(before)
    print(f"| flipped bits | {found.total()} | {dict(found)} |", flush=True)


def _values(state) -> list[bytes]:
    arrays = metadata.arrays_by_name(state).values()
    keys = (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays)
    plain = (
        jax.random.key_data(x) if is_key else x
        for x, is_key in zip(arrays, keys, strict=True)
    )
    return [np.asarray(x).tobytes() for x in plain]

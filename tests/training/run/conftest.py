"""A run of twelve steps, and one that a signal stopped, for the tests that go on."""

import shutil
from pathlib import Path

import pytest

from stopped_runs import GIVEN, train, train_to


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run of twelve steps, evaluated after the sixth and the last."""
    return train(tmp_path_factory.mktemp("whole"), **GIVEN)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that a signal ended at step 6, with checkpoints 4 and 6."""
    return train_to(6, tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def run(stopped, tmp_path) -> Path:
    """A copy of the stopped run; its parent is the folder to train in."""
    shutil.copytree(stopped, tmp_path / "run")
    shutil.copy(stopped.parent / "tiny.py", tmp_path)
    return tmp_path / "run"

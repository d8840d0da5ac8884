"""A process that is killed while several save."""

import signal
import time

import pytest

from known_states import (
    check_whole,
    restore_step,
    save_and_die,
)
from processes import Processes

DEATHS = [
    (1, "jshard.storage.checkpoint.manifest.checksum"),
    pytest.param(
        0, "jshard.storage.checkpoint.manifest.checksum", marks=pytest.mark.slow
    ),
    pytest.param(0, "jshard.storage.checkpoint.manifest.write", marks=pytest.mark.slow),
    pytest.param(
        1,
        "jshard.storage.checkpoint.participants.Participants.gather",
        marks=pytest.mark.slow,
    ),
    pytest.param(0, "while arrays are written", marks=pytest.mark.slow),
    pytest.param(1, "while arrays are written", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "moment"), DEATHS)
def test_the_half_save_of_a_killed_process_is_ignored_and_removed(
    victim, moment, tmp_path
):
    folder = tmp_path / "checkpoints"
    with Processes(2, 1, tmp_path) as processes:
        processes.start(save_and_die, folder, victim, moment)
        assert processes.wait_for(victim, timeout=60) == -signal.SIGKILL
        time.sleep(0.5)  # whatever the other may do about it
        processes.kill()
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2.saving"]
    assert restore_step(folder, (1, 8)) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["1"]
    check_whole(folder / "1")

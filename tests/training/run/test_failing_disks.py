"""Runs whose disk is full for a while, refuses the last checkpoint, or loses them."""

import shutil
from typing import Any

import pytest

import jshard
from checkpoints import remount, small_disk
from jshard.storage.checkpoint.restore import find_damage
from jshard.storage.checkpoint.step_folders import find_steps
from jshard.system.errors import RunFailed
from jshard.training.run.progress import ProgressDisplay
from resumable import read_metrics, train
from test_going_on import RECIPE

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.slow  # test_failing_saves.py has a full disk
@pytest.mark.filterwarnings("ignore:cannot write to .*disk")
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(
    tmp_path, capsys
):
    keys: dict[str, Any] = {"recipe": RECIPE, "steps": 16, "checkpoint__every": 4}
    whole = train(tmp_path, "whole", **keys)
    with small_disk(tmp_path / "disk", "400k") as disk:

        def when_told(text: str) -> None:
            if "checkpoint saved" in text and not (disk / "other").exists():
                size = shutil.disk_usage(disk).free - 20_000
                (disk / "other").write_bytes(bytes(size))
            if "failed, training continues" in text:
                remount(disk, "size=4m")

        with pytest.MonkeyPatch.context() as patch:
            say = ProgressDisplay.say
            patch.setattr(
                ProgressDisplay,
                "say",
                lambda self, text: (say(self, text), when_told(text)),
            )
            run = train(disk, **keys)
        out = capsys.readouterr().out
        assert "failed, training continues: No space left on device\n" in out
        assert read_metrics(run) == read_metrics(whole)
        assert 16 in find_steps(run / "checkpoints")
        assert not any(find_damage(path) for path in (run / "checkpoints").iterdir())


@pytest.mark.quick("4")  # RunFolder's own test has the other branch
@pytest.mark.parametrize(("every", "again"), [(4, True), (0, False)])
def test_a_run_whose_folder_is_deleted_fails_and_says_so(again, every, tmp_path):
    def delete(trainer, step, metrics):
        if step == 6:
            (tmp_path / "run").rename(tmp_path / "gone")
            if again:
                (tmp_path / "run").mkdir()

    (tmp_path / "tiny.py").write_text(RECIPE)
    trainer = jshard.Trainer(
        tmp_path / "tiny.py",
        config={"steps": 10, "checkpoint.every": every},
        workdir=tmp_path / "run",
        on_step=delete,
    )
    with pytest.raises(RunFailed, match=r"run was deleted, moved or replaced while"):
        trainer.fit()
    # On a busy machine the save of step 4 is still being written, and fails first.
    assert int(trainer.state.step) in ((6, 8) if every else (10,))


def test_a_last_checkpoint_that_fails_ends_the_run_with_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jshard.storage.checkpoint.manifest.write",
        lambda *_: (_ for _ in ()).throw(OSError(28, "full")),
    )
    with pytest.raises(RunFailed, match=r"state of step 1 could not be saved: .*full"):
        train(tmp_path, recipe=RECIPE, steps=1)

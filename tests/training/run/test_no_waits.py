"""A step waits for nothing that a run does beside it."""

import sys
import threading

import jshard
import resumable
from jshard.storage.checkpoint import manifest

TRACKED = (
    resumable.RECIPE
    + """
import resumable


class Tracker(jshard.training.Tracker):
    def log(self, step, when, values):
        assert resumable.answered.wait(30), "the run waited for its tracker"

    def close(self, *, failed):
        pass


def tracker(config):
    return Tracker()
"""
)


def test_steps_wait_for_no_disk_no_tracker_and_no_import(tmp_path, monkeypatch):
    """The save of step 4 and the tracker stop until step 8 has ended."""
    answered, stopped, modules = threading.Event(), [], {}
    checksum = manifest.checksum

    def stopping(*args):
        stopped.append(answered.wait(30))
        return checksum(*args)

    def on_step(trainer, step, metrics):
        modules[step] = {*sys.modules}
        if step == 8:
            assert not answered.is_set()
            answered.set()

    monkeypatch.setattr(manifest, "checksum", stopping)
    monkeypatch.setattr(resumable, "answered", answered, raising=False)
    (tmp_path / "tracked.py").write_text(TRACKED)
    trainer = jshard.Trainer(
        tmp_path / "tracked.py",
        workdir=tmp_path / "run",
        config={"steps": 9, "checkpoint.every": 4, "log_every": 1, "eval_every": 0},
        on_step=on_step,
    )
    trainer.fit()
    assert stopped
    assert all(stopped)
    assert modules[8] == modules[5]

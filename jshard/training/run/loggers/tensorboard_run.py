"""A run's events for TensorBoard, a file in its folder."""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.summary_v2 import text_pb

# Not its EventFileWriter: that one's thread dies when the disk is full, with a
# traceback, and then blocks its callers and the end of the process.
from tensorboard.summary.writer.record_writer import RecordWriter

from jshard.training.run.loggers.tracker import Tracker


class TensorboardRun(Tracker):
    """A new file of scalars, hyperparameters and samples.

    With `resume_from`, TensorBoard drops what older files have of later steps.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], resume_from: int | None):
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = (path / name).open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resume_from is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(step=resume_from + 1, session_log=restart)
        plain = {
            k: v if isinstance(v, int | float) else str(v) for k, v in config.items()
        }
        shown = [hparams.Metric(tag) for tag in ("train/loss", "eval/loss")]
        # A domain without values leaves all filters of a type to TensorBoard's page.
        keys = [
            hparams.HParam(k, hparams.Discrete((), type(v))) for k, v in plain.items()
        ]
        self._write(summary=hparams.hparams_config_pb(keys, shown))
        self._write(summary=hparams.hparams_pb(plain))

    def log(self, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step, and the time in seconds since 1970."""
        scalars = [
            Summary.Value(tag=_tag(k), simple_value=v) for k, v in values.items()
        ]
        self._write(step=step, wall_time=when, summary=Summary(value=scalars))

    def text(self, step: int, name: str, text: str) -> None:
        """Adds a text, indented: TensorBoard would take it for Markdown."""
        lines = "".join(f"    {line}\n" for line in text.splitlines())
        self._write(step=step, summary=text_pb(f"samples/{name}/text_summary", lines))

    def picture(self, step: int, name: str, file: Path) -> None:
        """Adds a picture, in a PNG file."""
        png = file.read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(
            width=width, height=height, colorspace=3, encoded_image_string=png
        )
        value = Summary.Value(tag=f"samples/{name}", image=image)
        self._write(step=step, summary=Summary(value=[value]))

    def send(self) -> None:
        """Waits until all of it is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, *, failed: bool) -> None:
        """Closes the file, whether or not the run failed."""
        del failed
        self._file.close()

    def _write(self, **event: Any) -> None:
        event = {"wall_time": time.time(), **event}
        self._records.write(Event(**event).SerializeToString())


def _tag(name: str) -> str:
    """Returns the tag of a metric; charts are grouped by what is before the slash."""
    group, _, rest = name.partition("_")
    has_group = group in ("eval", "checkpoint") and rest
    return f"{group}/{rest}" if has_group else f"train/{name}"

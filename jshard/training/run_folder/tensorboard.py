"""TensorBoard event files, written at once.

tensorboardX's own writer is a thread that dies of a full disk, and then blocks who
writes to it. Its events and checksums are used here, not its files.
"""

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from jshard.training.run_folder.append import AppendedFile


class EventFile(AppendedFile):
    """A file of scalars in a run's folder."""

    def __init__(self, folder: Path, resume_from: int | None = None):
        """Opens a new file.

        Args:
          folder: The run's folder.
          resume_from: The step after which TensorBoard is to forget what the folder's
            other files say.

        Raises:
          OSError: It cannot be opened.
        """
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        super().__init__(folder / name)
        self._add(file_version="brain.Event:2")
        if resume_from is not None:
            log = SessionLog(status=SessionLog.START)
            self._add(step=resume_from + 1, session_log=log)

    def add(self, step: int, values: Mapping[str, float]) -> str:
        """Writes the values of a step, each a chart of its own; returns as `write`."""
        problem = ""
        for name, value in values.items():
            # A group of charts each: eval_loss is eval/loss.
            group, _, rest = name.partition("_")
            grouped = group in ("eval", "checkpoint") and rest
            tag = f"{group}/{rest}" if grouped else f"train/{name}"
            problem = self._add(step=step, summary=scalar(tag, value))
        return problem

    def _add(self, **event) -> str:
        """Frames an event as a TFRecord: length, its checksum, data, its checksum."""
        data = Event(wall_time=time.time(), **event).SerializeToString()
        length = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        return self.write(length + sums[0] + data + sums[1])

"""Records of TensorBoard's event files, made of tensorboardX's parts.

tensorboardX's own writer is a thread that dies of a full disk, and then blocks who
writes to it; its events and checksums are not documented, and used here alone. Tried
on tensorboardX 2.6.5. When it breaks, no run can write its folder.
"""

import struct
import time
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar


def version_record() -> bytes:
    """The first of a file."""
    return _record(file_version="brain.Event:2")


def restart_record(step: int) -> bytes:
    """Has TensorBoard forget what other files say of this step and later ones."""
    return _record(step=step, session_log=SessionLog(status=SessionLog.START))


def scalar_record(step: int, tag: str, value: float) -> bytes:
    """A value of a step, in the chart named ``tag``."""
    return _record(step=step, summary=scalar(tag, value))


def _record(**event: Any) -> bytes:
    """Frames an event as a TFRecord: length, its checksum, data, its checksum."""
    data = Event(wall_time=time.time(), **event).SerializeToString()
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]

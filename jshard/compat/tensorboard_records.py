"""Builds the records of TensorBoard event files from parts of tensorboardX.

tensorboardX's own writer is a thread that dies when the disk is full and then blocks
its callers. Its event types and checksums are undocumented, and are used only here.
Tested with tensorboardX 2.6.5. If it breaks, no run can write its folder.
"""

import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


def version_record() -> bytes:
    """Returns the record that must come first in an event file."""
    return _record(file_version="brain.Event:2")


def restart_record(step: int) -> bytes:
    """Returns a record that makes TensorBoard drop earlier data from ``step`` on."""
    return _record(step=step, session_log=SessionLog(status=SessionLog.START))


def scalars_record(step: int, when: float, values: Mapping[str, float]) -> bytes:
    """Returns the record of a step's scalars, by the tag of their chart.

    ``when`` is in seconds since 1970.
    """
    scalars = [Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
    return _record(step=step, wall_time=when, summary=Summary(value=scalars))


def text_record(step: int, tag: str, text: str) -> bytes:
    """Returns the record of a text, as it is, for one step."""
    indented = "".join(f"    {line}\n" for line in text.splitlines())  # not Markdown
    return _record(step=step, summary=summary.text(tag, indented))


def picture_record(step: int, tag: str, png: bytes, height: int, width: int) -> bytes:
    """Returns the record of a picture for one step."""
    image = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=png
    )
    return _record(
        step=step, summary=Summary(value=[Summary.Value(tag=tag, image=image)])
    )


def hyperparameter_records(values: Mapping[str, Any], metrics: Iterable[str]) -> bytes:
    """Returns the records of a run's hyperparameters, by name.

    ``metrics`` are the tags of the scalars to show beside them.
    """
    # The third would say that the run has ended.
    first, second, _ = summary.hparams(values, dict.fromkeys(metrics))
    return _record(summary=first) + _record(summary=second)


def _record(**event: Any) -> bytes:
    """Frames an event as a TFRecord: length and data, each with its checksum."""
    data = Event(**{"wall_time": time.time(), **event}).SerializeToString()
    length = struct.pack("<Q", len(data))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
    return length + sums[0] + data + sums[1]

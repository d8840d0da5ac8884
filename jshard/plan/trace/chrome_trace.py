"""Reads a trace in Chrome's form, which Perfetto shows: ``trace.json.gz``."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from jshard.plan.trace.rows import Row
from jshard.system.errors import UserError
from jshard.system.files.untrusted import parse_json


def read_chrome(file: Path) -> Iterator[Row]:
    """Yields the events of a file, compressed or not.

    Raises:
      UserError: it is no such file, or it is cut off.
    """
    try:
        data = file.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        events = parse_json(text)["traceEvents"]
        planes = {x["pid"]: x["args"]["name"] for x in _named(events, "process_name")}
        lines = {
            (x["pid"], x["tid"]): x["args"]["name"]
            for x in _named(events, "thread_name")
        }
        for x in events:
            if x.get("ph") == "X":
                place = (x["pid"], x["tid"])
                plane, line = planes.get(place[0], ""), lines.get(place, "")
                start, seconds = 1e-6 * x["ts"], 1e-6 * x["dur"]
                yield Row(plane, line, x["name"], start, seconds, x.get("args", {}))
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"--profile={file}: {why}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--profile={file}: is no trace of JAX ({error})") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"--profile={file}: is cut off ({error})") from error


def _named(events: list[dict], kind: str) -> Iterator[dict]:
    return (x for x in events if x.get("ph") == "M" and x.get("name") == kind)

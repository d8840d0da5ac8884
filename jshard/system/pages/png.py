"""Pictures as PNG files, without a library for images."""

import struct
import zlib

import numpy as np


def png(picture: np.ndarray) -> bytes:
    """Returns a PNG file.

    Args:
      picture: [height, width] or [height, width, 3]; floats and truth values from 0 to
        1, or integers from 0 to 255. Values beyond are cut off.
    """
    if picture.dtype.kind in "fb":
        picture = np.nan_to_num(picture.astype(np.float64)) * 255
    pixels = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), rows], axis=1)  # no filter
    color = 2 if picture.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", header),
            _chunk(b"IDAT", zlib.compress(rows.tobytes())),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum

"""IDX files, the format of MNIST and Fashion-MNIST: a typed, shaped block of unsigned bytes.

    offset 0   0x00 0x00 TYPE RANK      TYPE 0x08 is uint8, the only one these data sets use
    offset 4   RANK big-endian uint32   the shape
    then       the bytes, last axis fastest

Files may be gzip-compressed; that is told from their first two bytes, not from their name. A file
is refused unless its length is exactly what its header says: a download that was cut short or a
page saved under the wrong name would otherwise become noise with labels.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 0x08


def read_idx(path: str | Path, rank: int | None = None) -> np.ndarray:
    """Read one IDX file of unsigned bytes.

    Args:
        path: the file, plain or gzip-compressed.
        rank: expected number of axes (3 for images, 1 for labels); None takes any.

    Returns:
        Writable uint8 array of the shape in the header.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an IDX file of uint8, another rank, or a length that does not fit the
            header; the message names the file.
    """
    path = Path(path)
    content = path.read_bytes()
    if content[:2] == _GZIP_MAGIC:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip data ({error})") from error
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ValueError(f"{path}: not an IDX file (it must start with two zero bytes)")
    kind, found_rank = content[2], content[3]
    if kind != _UINT8:
        raise ValueError(f"{path}: IDX type 0x{kind:02x} is not supported, only uint8 (0x08)")
    if found_rank == 0 or (rank is not None and found_rank != rank):
        raise ValueError(f"{path}: {found_rank} axes, expected {rank or 'at least 1'}")
    start = 4 + 4 * found_rank
    if len(content) < start:
        raise ValueError(f"{path}: the file ends inside its header")
    shape = struct.unpack(f">{found_rank}I", content[4:start])
    expected = math.prod(shape)
    if len(content) - start != expected:
        raise ValueError(
            f"{path}: the header says {expected} bytes for shape {shape}, "
            f"the file holds {len(content) - start}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def idx_bytes(array: np.ndarray) -> bytes:
    """Gzip-compressed IDX content of a uint8 array, the same bytes on every call.

    Raises:
        ValueError: another dtype, or no axes.
    """
    if array.dtype != np.uint8 or array.ndim == 0:
        raise ValueError(f"array must be uint8 with at least one axis, got {array.dtype}")
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, _UINT8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes(), compresslevel=9, mtime=0)

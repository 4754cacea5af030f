"""The IDX reader takes exactly what its header promises and names the file otherwise."""

import gzip
import struct

import numpy as np
import pytest

from fastswin.data.idx import idx_bytes, read_idx

ARRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
PLAIN = gzip.decompress(idx_bytes(ARRAY))


@pytest.mark.parametrize("content", [PLAIN, idx_bytes(ARRAY)], ids=["plain", "gzip"])
def test_round_trip(tmp_path, content):
    path = tmp_path / "whatever.name"
    path.write_bytes(content)
    read = read_idx(path, rank=3)
    assert read.dtype == np.uint8
    assert read.flags.writeable
    np.testing.assert_array_equal(read, ARRAY)


def test_empty_first_axis(tmp_path):
    path = tmp_path / "empty"
    path.write_bytes(idx_bytes(np.empty((0, 28, 28), np.uint8)))
    assert read_idx(path).shape == (0, 28, 28)


def test_bytes_are_the_same_on_every_call():
    assert idx_bytes(ARRAY) == idx_bytes(ARRAY.copy())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file"),
        (b"<html>not found</html>", "not an IDX file"),
        (b"\x89PNG\r\n\x1a\n", "not an IDX file"),
        (b"\0\0\x0d\x01" + struct.pack(">I", 1) + b"\0" * 4, "type 0x0d"),
        (b"\0\0\x08\x00", "0 axes"),
        (PLAIN[:8], "ends inside its header"),
        (PLAIN[:-1], "the file holds 23"),
        (PLAIN + b"\0", "the file holds 25"),
        (idx_bytes(ARRAY)[:-6], "damaged gzip"),
        (idx_bytes(ARRAY)[:-12] + b"\xff" * 12, "damaged gzip"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 2**31, 2**31, 2**31), "the file holds 0"),
    ],
    ids=[
        "empty", "html", "png", "float-type", "no-axes", "cut-header", "one-byte-short",
        "one-byte-long", "cut-gzip", "corrupt-gzip", "absurd-shape",
    ],
)  # fmt: skip
def test_malformed_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_rank_is_refused(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(idx_bytes(ARRAY))
    with pytest.raises(ValueError, match="3 axes, expected 1"):
        read_idx(path, rank=1)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_idx(tmp_path / "absent")


def test_only_uint8_is_written():
    with pytest.raises(ValueError, match="uint8"):
        idx_bytes(ARRAY.astype(np.int64))

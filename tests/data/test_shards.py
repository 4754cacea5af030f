"""Photos in tar files: labels beside them or in folder names, order, and what is refused."""

import io
import json
import tarfile

import pytest
from PIL import Image

from fastswin.data.preprocess import Preprocess
from fastswin.data.shards import TarShards

SMALL = Preprocess(image_size=(8, 8), crop_ratio=1.0)


def png(value):
    buffer = io.BytesIO()
    Image.new("L", (9, 7), value).save(buffer, "PNG")
    return buffer.getvalue()


def write(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def read(shards, batch=2):
    found = [(i[:, 0, 0, 0].tolist(), t.tolist()) for i, t in shards.batches(SMALL, batch)]
    return [v for images, _ in found for v in images], [v for _, labels in found for v in labels]


def test_labels_beside_the_photos_over_two_shards(tmp_path):
    write(tmp_path / "s-1.tar", [("b.png", png(30)), ("b.json", json.dumps({"label": 1}).encode())])
    write(
        tmp_path / "s-0.tar",
        [("x/a.cls", b"2\n"), ("x/a.png", png(10)), ("c.png", png(20)), ("c.cls", b"0")],
    )
    assert read(TarShards(tmp_path, 3)) == ([10, 20, 30], [2, 0, 1])
    assert read(TarShards(tmp_path / "s-1.tar", 3)) == ([30], [1])


def test_class_folders_inside(tmp_path):
    write(tmp_path / "a.tar", [("val/dog/1.png", png(7)), ("val/cat/2.png", png(9))])
    assert read(TarShards(tmp_path, 2)) == ([7, 9], [1, 0])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", b""), ("a.cls", b"three")], "no plain tar file of photos"),
        ([("a.png", b""), ("a.cls", b"5")], "a.png is of class 5, the model has 3"),
        ([("a.png", b"")], "a.png has no .cls or .json beside it"),
        ([("x/a.png", b"")], "1 class folders and the model has 3"),
        ([("a.txt", b"")], "no image files"),
    ],
    ids=["label-text", "label-range", "no-label", "folders", "no-photos"],
)
def test_what_is_wrong_is_named(tmp_path, members, message):
    write(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=message):
        TarShards(tmp_path, 3)


def test_damaged_photos_and_archives(tmp_path):
    write(tmp_path / "a.tar", [("a.png", b"no png"), ("a.cls", b"0")])
    with pytest.raises(ValueError, match=r"a\.tar:a\.png: not an image"):
        read(TarShards(tmp_path, 1))
    write(tmp_path / "a.tar", [("a.png", png(1)), ("a.cls", b"0")], "w:gz")
    with pytest.raises(ValueError, match="no plain tar file"):
        TarShards(tmp_path, 1)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(FileNotFoundError, match=r"no \.tar files"):
        TarShards(tmp_path, 1)

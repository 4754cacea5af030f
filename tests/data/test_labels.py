"""Labels files of any kind."""

import json

import pytest
from PIL import Image

from fastswin.data import labels as labels_module
from fastswin.data.labels import read_labels

SYNSETS = {"n01440764": 0, "n01443537": 1, "n15075141": 2}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(labels_module, "synset_indices", lambda _: SYNSETS)
    for name in ("a b.png", "c.JPEG", "d.JPEG"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.txt", "a b.png 2\nc.JPEG 0\nd.JPEG 1\n"),
        ("l.tsv", "a b.png\t2\nc.JPEG\t0\nd.JPEG\t1\n"),
        ("l.csv", "file,class\na b.png, 2\nc.JPEG,0\nd.JPEG,1\n"),
        ("l.csv", "a b.png,shoe\nc.JPEG,cat\nd,dog\n"),
        ("l.csv", "ImageId,PredictionString\na b.png,n15075141 1 2 3 4 n15075141 0 0 1 1\n"
                  "c,n01440764 1 2 3 4\nd,n01443537 \n"),
        ("l.json", json.dumps({"a b.png": 2, "c.JPEG": "cat", "d.JPEG": "n01443537"})),
        ("l.json", json.dumps([["a b.png", 2], ["c.JPEG", 0], ["d.JPEG", 1]])),
    ],
    ids=["text", "tab", "csv-header", "class-names", "kaggle", "json-object", "json-pairs"],
)  # fmt: skip
def test_every_form_reads_alike(root, name, text):
    (root / name).write_text(text)
    found = read_labels(root / name, root, 3, ["cat", "dog", "shoe"])
    assert found == [(root / "a b.png", 2), (root / "c.JPEG", 0), (root / "d.JPEG", 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "c.JPEG,0\nd.JPEG,bird\n", "line 2.*'bird'"),
        ("l.csv", "c.JPEG,3\n", "line 1.*below 3"),
        ("l.json", "{", "expected an object"),
        ("l.json", '{"c.JPEG": 7}', "entry 1"),
        ("l.json", "3", "expected an object"),
        ("l.csv", "file,class\n", "is empty"),
    ],
    ids=["unknown-name", "too-large", "broken-json", "json-value", "json-number", "header-only"],
)
def test_what_is_wrong_is_named(root, name, text, message):
    (root / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_labels(root / name, root, 3, ["cat", "dog", "shoe"])

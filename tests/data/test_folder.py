"""Image folders: which index a photo gets, and what is refused."""

import pytest
from PIL import Image

from fastswin.data import folder as folder_module
from fastswin.data.folder import ImageFolder
from fastswin.data.preprocess import Preprocess

SMALL = Preprocess(image_size=(8, 8), crop_ratio=1.0)


def photo(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (9, 7), value).save(path)


def read(dataset, batch):
    found = [(i[:, 0, 0, 0].tolist(), t.tolist()) for i, t in dataset.batches(SMALL, batch)]
    return [image for images, _ in found for image in images], [
        label for _, labels in found for label in labels
    ]


def test_class_folders_are_numbered_in_sorted_order(tmp_path):
    for value, name in [(30, "b/x.png"), (10, "a/y.png"), (20, "a/z/deep.png"), (40, "c/w.jpg")]:
        photo(tmp_path / name, value)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    dataset = ImageFolder(tmp_path, num_classes=3)
    assert len(dataset) == 4
    for batch in (1, 3, 10):
        images, labels = read(dataset, batch)
        assert images == pytest.approx([10, 20, 30, 40], abs=2)
        assert labels == [0, 0, 1, 2]


def test_synset_folders_get_imagenets_index(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "synset_indices", lambda _: {"n01": 0, "n02": 7, "n03": 999})
    photo(tmp_path / "n03" / "a.png", 1)
    photo(tmp_path / "n02" / "b.png", 2)
    assert read(ImageFolder(tmp_path, num_classes=1000), 4) == ([2, 1], [7, 999])


def test_imagenet_synsets_from_timm(tmp_path):
    photo(tmp_path / "n01440764" / "tench.png", 5)
    photo(tmp_path / "n15075141" / "last.png", 6)
    assert [label for _, label in ImageFolder(tmp_path, 1000).samples] == [0, 999]


def test_labels_file(tmp_path):
    photo(tmp_path / "one photo.png", 10)
    photo(tmp_path / "sub" / "two.png", 20)
    labels = tmp_path / "labels.txt"
    labels.write_text("sub/two.png 3\n\none photo.png 0\n")
    assert read(ImageFolder(tmp_path, 4, labels), 2) == ([20, 10], [3, 0])


@pytest.mark.parametrize(
    "line", ["a.png", "a.png x", "a.png -1", "a.png 4", " 3", "a.png 1.5"],
    ids=["no-label", "text", "negative", "too-large", "no-path", "fraction"],
)  # fmt: skip
def test_bad_labels_line_is_named(tmp_path, line):
    labels = tmp_path / "labels.txt"
    labels.write_text(f"good.png 0\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        ImageFolder(tmp_path, 4, labels)


def test_class_count_must_fit(tmp_path):
    photo(tmp_path / "a" / "x.png", 1)
    photo(tmp_path / "b" / "x.png", 1)
    with pytest.raises(ValueError, match="2 class folders and the model has 10"):
        ImageFolder(tmp_path, 10)


def test_unusable_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="data"):
        ImageFolder(tmp_path / "absent", 2)
    with pytest.raises(ValueError, match="no class folders"):
        ImageFolder(tmp_path, 2)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="no image files"):
        ImageFolder(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="labels"):
        ImageFolder(tmp_path, 1, tmp_path / "absent.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        ImageFolder(tmp_path, 1, tmp_path / "empty.txt")


def test_damaged_file_in_the_stream_is_named(tmp_path):
    photo(tmp_path / "a" / "1.png", 1)
    (tmp_path / "a" / "2.png").write_bytes(b"not a png")
    stream = ImageFolder(tmp_path, 1).batches(SMALL, 1)
    assert next(stream)[1].tolist() == [0]
    with pytest.raises(ValueError, match=r"2\.png"):
        next(stream)

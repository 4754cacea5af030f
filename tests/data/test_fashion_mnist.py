"""The shipped slices, and the reader of the whole set."""

import numpy as np
import pytest

from fastswin.data import fashion_mnist, fashion_mnist_slice
from fastswin.data.fashion_mnist import class_names, load_split
from fastswin.data.idx import idx_bytes
from fastswin.data.shipped import SHIPPED, ShippedWeightsMissingError, shipped_checkpoint


@pytest.mark.parametrize(("name", "count"), [("test", 2000), ("calibration", 512)])
def test_slices_hold_distinct_labelled_images(name, count):
    images, labels = fashion_mnist_slice(name)
    assert images.shape == (count, 28, 28)
    assert labels.shape == (count,)
    assert images.dtype == labels.dtype == np.uint8
    assert len(np.unique(images.reshape(count, -1), axis=0)) == count
    assert np.bincount(labels, minlength=10).min() >= 0.08 * count


def test_slices_start_where_the_data_set_does():
    assert fashion_mnist_slice("test")[1][:10].tolist() == [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]
    assert fashion_mnist_slice("calibration")[1][:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]


def test_class_names():
    assert len(set(class_names())) == 10
    assert class_names()[9] == "Ankle boot"


def test_unknown_slice_lists_the_legal_ones():
    with pytest.raises(ValueError, match=r"'test', 'calibration'.*'train'"):
        fashion_mnist_slice("train")


def _write(folder, images, labels):
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(idx_bytes(images))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(idx_bytes(labels))


def test_load_split_reads_a_folder(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    _write(tmp_path, images, np.array([4, 0, 9], np.uint8))
    read, labels = load_split(tmp_path, "test")
    np.testing.assert_array_equal(read, images)
    assert labels.tolist() == [4, 0, 9]


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        ((3, 28, 28), [1, 2], "2 labels for 3 images"),
        ((2, 28, 28), [1, 10], "label 10"),
        ((2, 32, 32), [1, 2], "expected \\(28, 28\\)"),
    ],
    ids=["count", "label-range", "image-size"],
)
def test_files_that_do_not_belong_together(tmp_path, shape, labels, message):
    _write(tmp_path, np.zeros(shape, np.uint8), np.array(labels, np.uint8))
    with pytest.raises(ValueError, match=message):
        load_split(tmp_path, "test")


def test_missing_data_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist"):
        load_split(tmp_path, "train")


def test_unknown_split(tmp_path):
    with pytest.raises(ValueError, match="split"):
        load_split(tmp_path, "validation")


def test_shipped_checkpoint_that_is_absent(monkeypatch, tmp_path):
    monkeypatch.setitem(SHIPPED, "swin_fashion_mnist", tmp_path / "absent.safetensors")
    with pytest.raises(ShippedWeightsMissingError, match=r"train_fashion\.py"):
        shipped_checkpoint("swin_fashion_mnist")


def test_unknown_shipped_model():
    with pytest.raises(ValueError, match=r"legal: .*swin_fashion_mnist"):
        shipped_checkpoint("swin_mnist")


def test_slices_are_small():
    assert sum(f.stat().st_size for f in fashion_mnist.ASSETS.glob("*.gz")) < 1.3e6

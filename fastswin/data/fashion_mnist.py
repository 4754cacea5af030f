"""Fashion-MNIST: the whole data set from a folder, and the slices that ship with the package.

70,000 grey 28x28 images of ten kinds of clothing (Xiao, Rasul, Vollgraf 2017, MIT licence). The
Debian package ``dataset-fashion-mnist`` installs the four IDX files; the slices are the *first*
2,000 test images (accuracy, parity) and the *first* 512 training images (calibration).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from fastswin.data.idx import read_idx
from fastswin.data.preprocess import Preprocess

SliceName = Literal["test", "calibration"]
Split = Literal["train", "test"]

ASSETS = Path(__file__).parent.parent / "assets" / "fashion_mnist"

#: Where Debian's dataset-fashion-mnist puts the files.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

#: Mean and standard deviation of the 60,000 training images' pixels. Enlarged four times, a 4x4
#: patch is one pixel with its surroundings: 28x28 tokens that know a gradient from the start.
PREPROCESS = Preprocess(
    image_size=(28, 28), mean=(0.2860,), std=(0.3530,), crop_ratio=1.0, enlarge_factor=4
)

SLICE_STEMS: dict[SliceName, str] = {"test": "test_2000", "calibration": "train_512"}
_SPLIT_STEMS: dict[Split, str] = {"train": "train", "test": "t10k"}


@functools.cache
def class_names() -> tuple[str, ...]:
    """The ten class names in label order."""
    return tuple(json.loads((ASSETS / "classes.json").read_text(encoding="utf-8")))


def load_split(folder: str | Path, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split of the whole data set.

    Args:
        folder: holds the four ``*-ubyte.gz`` files.
        split: "train" (60,000) or "test" (10,000).

    Returns:
        uint8 ``[n, 28, 28]`` and uint8 ``[n]``.

    Raises:
        FileNotFoundError: a file is missing; the message says where to get it.
        ValueError: a file is malformed, or images and labels do not belong together.
    """
    if split not in _SPLIT_STEMS:
        raise ValueError(f"split must be one of {get_args(Split)}, got {split!r}")
    return _read_pair(Path(folder), _SPLIT_STEMS[split])


def fashion_mnist_slice(name: SliceName) -> tuple[np.ndarray, np.ndarray]:
    """A shipped slice of Fashion-MNIST.

    Args:
        name: "test" (the first 2,000 test images) or "calibration" (the first 512 training
            images).

    Returns:
        uint8 ``[n, 28, 28]`` and uint8 ``[n]``.

    Raises:
        ValueError: unknown name.
    """
    if name not in SLICE_STEMS:
        raise ValueError(f"name must be one of {get_args(SliceName)}, got {name!r}")
    return _read_pair(ASSETS, SLICE_STEMS[name])


def _read_pair(folder: Path, stem: str) -> tuple[np.ndarray, np.ndarray]:
    paths = [folder / f"{stem}-images-idx3-ubyte.gz", folder / f"{stem}-labels-idx1-ubyte.gz"]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; Debian's package dataset-fashion-mnist installs the four "
                f"files in {DEBIAN_FOLDER}"
            )
    images, labels = read_idx(paths[0], rank=3), read_idx(paths[1], rank=1)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{paths[0]}: images are {images.shape[1:]}, expected (28, 28)")
    if len(images) != len(labels):
        raise ValueError(f"{paths[1]}: {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() > 9:
        raise ValueError(f"{paths[1]}: label {labels.max()} is outside 0-9")
    return images, labels

"""What a model is evaluated or calibrated on: shipped slices, photos in a folder or in tar files.

Under several processes each reads its share: every ``count``-th image, from its rank on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastswin.data.fashion_mnist import PREPROCESS, SliceName, fashion_mnist_slice
from fastswin.data.folder import ImageFolder
from fastswin.data.shards import TarShards, shards_in
from fastswin.data.source import ModelSource

Batch = tuple[torch.Tensor, torch.Tensor]
Share = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class TestSet:
    """Labelled images of a model's size.

    Attributes:
        name: what the images are, for people.
        size: number of images.
        batches: batch size to a stream of normalised float32 images ``[b, channels, h, w]`` and
            int64 labels ``[b]``, in a fixed order.
    """

    __test__ = False  # not a test class, whatever pytest makes of the name

    name: str
    size: int
    batches: Callable[[int], Iterator[Batch]]

    def __len__(self) -> int:
        return self.size


def open_test_set(
    source: ModelSource,
    data: str | Path | None = None,
    labels: str | Path | None = None,
    limit: int | None = None,
    *,
    share: Share = (0, 1),
) -> TestSet:
    """The test images for a model.

    Args:
        source: the model, for its preprocessing, classes and their names.
        data: photos in a folder (:class:`~fastswin.data.folder.ImageFolder`) or in tar files
            (:class:`~fastswin.data.shards.TarShards`); None takes the shipped slice of
            Fashion-MNIST, which only its own kind of model can read.
        labels: labels file of a flat folder.
        limit: keep the first images only.
        share: ``(rank, count)``: which part of them is read here.

    Raises:
        ValueError: the shipped slice does not fit the model, or the data are unusable.
        FileNotFoundError: the data or labels file is missing.
    """
    if data is None:
        if labels is not None:
            raise ValueError("labels: needs data, the folder that it describes")
        return shipped_test_set(source, limit, share=share)
    dataset = _open(source, Path(data), labels)
    return _as_test_set(source, str(data), dataset, slice(limit), share)


def open_calibration_set(
    source: ModelSource,
    data: str | Path | None = None,
    labels: str | Path | None = None,
    images: int = 512,
    *,
    share: Share = (0, 1),
) -> TestSet:
    """Images to calibrate a model with, spread evenly over all that there are.

    Arguments and errors are those of :func:`open_test_set`; None as data takes the first 512
    Fashion-MNIST training images, which ship with the package.
    """
    if data is None:
        if labels is not None:
            raise ValueError("labels: needs data, the folder that it describes")
        return shipped_test_set(source, images, name="calibration", share=share)
    dataset = _open(source, Path(data), labels)
    step = max(1, len(dataset.samples) // images)
    return _as_test_set(source, str(data), dataset, slice(0, step * images, step), share)


def _open(source: ModelSource, data: Path, labels: str | Path | None) -> ImageFolder | TarShards:
    classes = source.model.config.num_classes
    if labels is None and shards_in(data):
        return TarShards(data, classes)
    return ImageFolder(data, classes, labels, source.class_names)


def _as_test_set(
    source: ModelSource, name: str, dataset: ImageFolder | TarShards, kept: slice, share: Share
) -> TestSet:
    dataset.samples = dataset.samples[kept][share[0] :: share[1]]

    def batches(batch: int) -> Iterator[Batch]:
        for pixels, truth in dataset.batches(source.preprocess, batch):
            yield source.preprocess(pixels), truth

    return TestSet(name, len(dataset), batches)


def shipped_test_set(
    source: ModelSource,
    limit: int | None = None,
    *,
    name: SliceName = "test",
    share: Share = (0, 1),
) -> TestSet:
    """The first 2,000 Fashion-MNIST test images, or the first 512 training images.

    Raises:
        ValueError: the model is not a ten-class one for 28x28 grey images.
    """
    preprocess, classes = source.preprocess, source.model.config.num_classes
    if (preprocess.image_size, preprocess.in_channels, classes) != (
        PREPROCESS.image_size,
        PREPROCESS.in_channels,
        10,
    ):
        raise ValueError(
            f"data: the shipped images are 28x28 grey of 10 classes, {source.name} takes "
            f"{preprocess.image_size[0]}x{preprocess.image_size[1]} with {preprocess.in_channels} "
            f"channels and {classes} classes; give a folder"
        )
    pixels, labels = fashion_mnist_slice(name)
    chosen = slice(share[0], limit, share[1])
    images, truth = torch.from_numpy(pixels[chosen]), torch.from_numpy(labels[chosen])

    def batches(batch: int) -> Iterator[Batch]:
        for part, classes in zip(images.split(batch), truth.split(batch), strict=True):
            yield preprocess(part), classes.long()

    kind = "test" if name == "test" else "training"
    last = len(pixels[:limit]) - 1
    return TestSet(f"Fashion-MNIST {kind} images 0-{last}", len(images), batches)

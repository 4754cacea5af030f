"""What a model is evaluated on: the shipped slice or a folder of photos, as a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fastswin.data.fashion_mnist import PREPROCESS, fashion_mnist_slice
from fastswin.data.folder import ImageFolder
from fastswin.data.source import ModelSource

Batch = tuple[torch.Tensor, torch.Tensor]


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
    folder: str | Path | None = None,
    labels: str | Path | None = None,
    limit: int | None = None,
) -> TestSet:
    """The test images for a model.

    Args:
        source: the model, for its preprocessing and number of classes.
        folder: photos, see :class:`~fastswin.data.folder.ImageFolder`; None takes the shipped
            slice of Fashion-MNIST, which only its own kind of model can read.
        labels: labels file of a flat folder.
        limit: keep the first images only.

    Raises:
        ValueError: the shipped slice does not fit the model, or the folder is unusable.
        FileNotFoundError: the folder or labels file is missing.
    """
    if folder is None:
        if labels is not None:
            raise ValueError("labels: needs data, the folder that it describes")
        return shipped_test_set(source, limit)
    dataset = ImageFolder(folder, source.model.config.num_classes, labels)
    dataset.samples = dataset.samples[:limit]

    def batches(batch: int) -> Iterator[Batch]:
        for pixels, truth in dataset.batches(source.preprocess, batch):
            yield source.preprocess(pixels), truth

    return TestSet(str(folder), len(dataset), batches)


def shipped_test_set(source: ModelSource, limit: int | None = None) -> TestSet:
    """The first 2,000 Fashion-MNIST test images.

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
    images, labels = (torch.from_numpy(a[:limit]) for a in fashion_mnist_slice("test"))

    def batches(batch: int) -> Iterator[Batch]:
        for pixels, truth in zip(images.split(batch), labels.split(batch), strict=True):
            yield preprocess(pixels), truth.long()

    return TestSet(f"Fashion-MNIST test images 0-{len(images) - 1}", len(images), batches)

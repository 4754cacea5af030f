"""Labelled photos in a folder, read as a stream of batches.

Two layouts:

    root/<class>/photo.jpg      one folder per class (ImageNet's training layout)
    root/photo.jpg + labels     a file that says which class each photo is (labels.py)

Class folders named by ImageNet synsets get ImageNet's index also when only some are present; other
names get their rank in sorted order, and there must be one per class of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from fastswin.data.class_names import synset_indices
from fastswin.data.images import load_image, require_pillow
from fastswin.data.labels import SUFFIXES, read_labels
from fastswin.data.preprocess import Preprocess

T = TypeVar("T")

#: Decoding releases the interpreter lock; more threads than this wait for the disk.
_THREADS = 8


class ImageFolder:
    """A folder of labelled photos.

    Args:
        root: the folder.
        num_classes: classes of the model that will read it.
        labels: see :mod:`fastswin.data.labels`; None means one folder per class.
        class_names: what a labels file may call the classes instead of by their index.

    Attributes:
        samples: ``(path, label)`` in reading order.

    Raises:
        FileNotFoundError: root or labels is missing.
        ValueError: no images, class folders that do not fit the model, or a malformed line.
    """

    def __init__(
        self,
        root: str | Path,
        num_classes: int,
        labels: str | Path | None = None,
        class_names: Sequence[str] = (),
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"data: {self.root} is not a folder")
        self.samples = (
            _from_folders(self.root, num_classes)
            if labels is None
            else read_labels(labels, self.root, num_classes, class_names)
        )

    def __len__(self) -> int:
        return len(self.samples)

    def batches(
        self, preprocess: Preprocess, batch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Stream uint8 images ``[b, channels, height, width]`` and int64 labels ``[b]``.

        One batch is decoded ahead while the caller works on the one before.

        Raises:
            ImportError: Pillow is not installed.
            ValueError: a file is damaged; the message names it.
        """
        load = functools.partial(_load, preprocess)
        return stream(self.samples, load, batch)


def _load(preprocess: Preprocess, path: Path) -> torch.Tensor:
    return load_image(path, preprocess)


def stream(
    samples: Sequence[tuple[T, int]], load: Callable[[T], torch.Tensor], batch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decode labelled samples in order, one batch ahead of the caller.

    Args:
        samples: ``(source, label)`` pairs.
        load: decodes one source to uint8 ``[channels, height, width]``; called in threads.
        batch: images per batch.
    """
    require_pillow()
    chunks = [samples[i : i + batch] for i in range(0, len(samples), batch)]
    with ThreadPoolExecutor(_THREADS) as pool:

        def submit(index: int) -> list[Future[torch.Tensor]]:
            chunk = chunks[index] if index < len(chunks) else []
            return [pool.submit(load, source) for source, _ in chunk]

        ahead = submit(0)
        for index, chunk in enumerate(chunks):
            current, ahead = ahead, submit(index + 1)
            try:
                images = torch.stack([future.result() for future in current])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            yield images, torch.tensor([label for _, label in chunk])


def _from_folders(root: Path, num_classes: int) -> list[tuple[Path, int]]:
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    if not folders:
        raise ValueError(f"data: {root} has no class folders; give a labels file for a flat folder")
    index = class_indices([folder.name for folder in folders], num_classes, str(root))
    samples = [
        (path, index[folder.name])
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not samples:
        raise ValueError(f"data: {root} holds no image files ({', '.join(sorted(SUFFIXES))})")
    return samples


def class_indices(names: Sequence[str], num_classes: int, where: str) -> dict[str, int]:
    """Class index of every class folder's name.

    Raises:
        ValueError: names that are no ImageNet synsets and not one per class of the model.
    """
    synsets = synset_indices(num_classes)
    if synsets and all(name in synsets for name in names):
        return {name: synsets[name] for name in names}
    if len(names) == num_classes:
        return {name: rank for rank, name in enumerate(sorted(names))}
    raise ValueError(
        f"data: {where} has {len(names)} class folders and the model has {num_classes} "
        "classes; name the folders by ImageNet synsets or give a labels file"
    )

"""Labelled photos in a folder, read as a stream of batches.

Two layouts:

    root/<class>/photo.jpg      one folder per class (ImageNet's training layout)
    root/photo.jpg + labels     a text file with ``<path> <class index>`` on every line

Class folders named by ImageNet synsets get ImageNet's index also when only some are present; other
names get their rank in sorted order, and there must be one per class of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fastswin.data.class_names import synset_indices
from fastswin.data.images import load_image, require_pillow
from fastswin.data.preprocess import Preprocess

SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"]
)

#: Decoding releases the interpreter lock; more threads than this wait for the disk.
_THREADS = 8


class ImageFolder:
    """A folder of labelled photos.

    Args:
        root: the folder.
        num_classes: classes of the model that will read it.
        labels: file of ``<path relative to root> <class index>`` lines; None means one folder per
            class.

    Attributes:
        samples: ``(path, label)`` in reading order.

    Raises:
        FileNotFoundError: root or labels is missing.
        ValueError: no images, class folders that do not fit the model, or a malformed line.
    """

    def __init__(
        self, root: str | Path, num_classes: int, labels: str | Path | None = None
    ) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"data: {self.root} is not a folder")
        self.samples = (
            _from_folders(self.root, num_classes)
            if labels is None
            else _from_labels(self.root, Path(labels), num_classes)
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
        require_pillow()
        chunks = [self.samples[i : i + batch] for i in range(0, len(self.samples), batch)]
        with ThreadPoolExecutor(_THREADS) as pool:

            def submit(index: int) -> list:
                chunk = chunks[index] if index < len(chunks) else []
                return [pool.submit(load_image, path, preprocess) for path, _ in chunk]

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
    synsets = synset_indices(num_classes)
    if synsets and all(folder.name in synsets for folder in folders):
        index = {folder: synsets[folder.name] for folder in folders}
    elif len(folders) == num_classes:
        index = {folder: rank for rank, folder in enumerate(folders)}
    else:
        raise ValueError(
            f"data: {root} has {len(folders)} class folders and the model has {num_classes} "
            "classes; name the folders by ImageNet synsets or give a labels file"
        )
    samples = [
        (path, index[folder])
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not samples:
        raise ValueError(f"data: {root} holds no image files ({', '.join(sorted(SUFFIXES))})")
    return samples


def _from_labels(root: Path, labels: Path, num_classes: int) -> list[tuple[Path, int]]:
    if not labels.is_file():
        raise FileNotFoundError(f"labels: {labels} is not a file")
    samples = []
    lines = labels.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, text = line.strip().rpartition(" ")
        if not name or not text.isdigit() or int(text) >= num_classes:
            raise ValueError(
                f"labels: {labels} line {number}: expected '<path> <class index below "
                f"{num_classes}>', got {line.strip()!r}"
            )
        samples.append((root / name.strip(), int(text)))
    if not samples:
        raise ValueError(f"labels: {labels} is empty")
    return samples

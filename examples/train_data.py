"""Training images by number, from a folder of classes or from tar shards.

    root/<class>/photo.jpg                    one folder per class
    root/*.tar with <key>.jpg and <key>.cls   shards; the .cls member holds the class number

Both are read at random by index, so that the order of an epoch follows from the seed alone and an
interrupted epoch goes on where it stopped. Shards are indexed once, not unpacked.
"""

from __future__ import annotations

import abc
import io
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Sampler

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photos(abc.ABC):
    """Encoded photos and their labels.

    Attributes:
        class_names: as the folders are called; numbers for shards.
    """

    class_names: list[str]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """Encoded image and class number."""


class FolderPhotos(Photos):
    """One folder per class, classes in sorted order."""

    def __init__(self, root: Path) -> None:
        folders = sorted(p for p in root.iterdir() if p.is_dir())
        self.class_names = [folder.name for folder in folders]
        self.samples = [
            (path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[bytes, int]:
        path, label = self.samples[index]
        return path.read_bytes(), label


class ShardPhotos(Photos):
    """Uncompressed tar files; a member is read by its offset."""

    def __init__(self, root: Path) -> None:
        self.samples: list[tuple[Path, int, int, int]] = []
        for path in sorted(root.glob("*.tar")):
            members: dict[str, dict[str, tarfile.TarInfo]] = {}
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    key, dot, suffix = member.name.rpartition(".")
                    if member.isfile() and dot:
                        members.setdefault(key, {})["." + suffix.lower()] = member
                for key, parts in members.items():
                    image = next((parts[s] for s in SUFFIXES if s in parts), None)
                    if image is None:
                        continue
                    if ".cls" not in parts:
                        raise ValueError(f"{path}: {key} has an image but no {key}.cls")
                    text = archive.extractfile(parts[".cls"])
                    assert text is not None
                    label = int(text.read().decode().strip())
                    self.samples.append((path, image.offset_data, image.size, label))
        classes = max((label for *_, label in self.samples), default=-1) + 1
        self.class_names = [str(label) for label in range(classes)]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[bytes, int]:
        path, offset, size, label = self.samples[index]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size), label


def open_photos(root: Path) -> Photos:
    """Shards where ``root`` holds tar files, else a folder of classes.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: no images in it.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"--data: {root} is not a folder")
    photos = ShardPhotos(root) if any(root.glob("*.tar")) else FolderPhotos(root)
    if not len(photos):
        raise ValueError(f"--data: no images with {', '.join(SUFFIXES)} in {root}")
    return photos


class Augmented(Dataset):
    """Random crop (8 to 100 % of the area, side ratio 3/4 to 4/3) and flip, normalised.

    An item is asked for as ``(epoch, index)``; what is drawn depends on these and the seed only.
    """

    def __init__(self, photos: Photos, image_size: tuple[int, int], seed: int) -> None:
        self.photos, self.image_size, self.seed = photos, image_size, seed

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, item: tuple[int, int]) -> tuple[torch.Tensor, int]:
        epoch, index = item
        content, label = self.photos.read(index)
        random = np.random.default_rng((self.seed, epoch, index))
        with Image.open(io.BytesIO(content)) as opened:
            image = opened.convert("RGB")
        box = _random_box(image.size, random)
        height, width = self.image_size
        image = image.resize((width, height), Image.Resampling.BICUBIC, box=box)
        pixels = np.asarray(image, np.float32) / 255.0
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        pixels = (pixels - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), label


def _random_box(
    size: tuple[int, int], random: np.random.Generator
) -> tuple[float, float, float, float]:
    width, height = size
    area = width * height * random.uniform(0.08, 1.0)
    ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = random.uniform(0, width - w), random.uniform(0, height - h)
    return left, top, left + w, top + h


class EpochOrder(Sampler):
    """``(epoch, index)`` of one process in the order of one epoch, whole batches only.

    The permutation is that of all processes together, dealt out in turn: the same photos in a step
    whatever the number of loader workers, and a resumed epoch skips what is done.
    """

    def __init__(
        self, count: int, batch: int, *, epoch: int, seed: int, first_step: int = 0,
        rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.steps = count // (batch * world)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        mine = order[: self.steps * batch * world].reshape(self.steps, world, batch)
        self.indices = mine[first_step:, rank].flatten().tolist()
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, index) for index in self.indices)

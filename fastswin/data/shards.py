"""Labelled photos in tar files, without unpacking them.

    key.jpg + key.cls       a text file with the class index beside each photo (WebDataset)
    key.jpg + key.json      an object with the class index as "label" or "cls"
    <class>/photo.jpg       one folder per class inside the archive, as in an image folder

Headers are read once to find where each photo lies; photos are then read from there in order.
"""

from __future__ import annotations

import functools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from fastswin.data.folder import class_indices, stream
from fastswin.data.images import decode_image
from fastswin.data.labels import SUFFIXES
from fastswin.data.preprocess import Preprocess


class Entry(NamedTuple):
    """Where a photo lies: ``size`` bytes at ``offset`` of a tar file."""

    shard: Path
    name: str
    offset: int
    size: int


class TarShards:
    """A stream of labelled photos out of tar files.

    Args:
        root: one ``.tar`` file, or a folder of them, read in the order of their names.
        num_classes: classes of the model that will read them.

    Attributes:
        samples: ``(entry, label)`` in reading order.

    Raises:
        FileNotFoundError: no such file, or no tar files in the folder.
        ValueError: a damaged or compressed archive, a photo without a label, or a label outside the
            model's classes.
    """

    def __init__(self, root: str | Path, num_classes: int) -> None:
        self.root = Path(root)
        shards = shards_in(self.root)
        if not shards:
            raise FileNotFoundError(f"data: {self.root} holds no .tar files")
        photos: list[tuple[Entry, int | None]] = []
        for shard in shards:
            photos += _scan(shard)
        if not photos:
            raise ValueError(f"data: {self.root} holds no image files")
        self.samples = _labelled(photos, num_classes, str(self.root))

    def __len__(self) -> int:
        return len(self.samples)

    def batches(
        self, preprocess: Preprocess, batch: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Stream uint8 images ``[b, channels, height, width]`` and int64 labels ``[b]``.

        Raises:
            ImportError: Pillow is not installed.
            ValueError: a photo is damaged; the message names it.
        """
        return stream(self.samples, functools.partial(_load, preprocess), batch)


def shards_in(root: Path) -> list[Path]:
    """The tar files that a path means; empty where it means none."""
    if root.is_file():
        return [root] if root.suffix == ".tar" else []
    return sorted(root.glob("*.tar")) if root.is_dir() else []


def _load(preprocess: Preprocess, entry: Entry) -> torch.Tensor:
    with entry.shard.open("rb") as file:
        file.seek(entry.offset)
        content = file.read(entry.size)
    return decode_image(content, f"{entry.shard}:{entry.name}", preprocess)


def _scan(shard: Path) -> list[tuple[Entry, int | None]]:
    """Photos of one archive with the label beside each, None where there is none."""
    photos: list[tuple[str, Entry]] = []
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as archive:  # uncompressed only: photos are read in place
            for member in archive:
                if not member.isfile():
                    continue
                path = PurePosixPath(member.name)
                key = str(path.with_suffix(""))
                if path.suffix.lower() in SUFFIXES:
                    where = Entry(shard, member.name, member.offset_data, member.size)
                    photos.append((key, where))
                elif path.suffix in (".cls", ".json"):
                    file = archive.extractfile(member)
                    assert file is not None
                    label = _label(file.read(), path.suffix)
                    if label is not None:
                        labels[key] = label
    except (tarfile.TarError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"data: {shard} is no plain tar file of photos ({error})") from error
    return [(entry, labels.get(key)) for key, entry in photos]


def _label(content: bytes, suffix: str) -> int | None:
    text = content.decode().strip()
    if suffix == ".cls":
        return int(text)
    values = json.loads(text)
    found = values.get("label", values.get("cls")) if isinstance(values, dict) else None
    return None if found is None else int(found)


def _labelled(
    photos: list[tuple[Entry, int | None]], num_classes: int, where: str
) -> list[tuple[Entry, int]]:
    """Every photo with its class: the one beside it, else that of its folder."""
    folders = sorted({PurePosixPath(e.name).parent.name for e, label in photos if label is None})
    if "" in folders:
        name = next(e.name for e, label in photos if label is None)
        raise ValueError(f"data: {where}: {name} has no .cls or .json beside it and no folder")
    index = class_indices(folders, num_classes, where) if folders else {}
    samples = []
    for entry, label in photos:
        found = index[PurePosixPath(entry.name).parent.name] if label is None else label
        if not 0 <= found < num_classes:
            raise ValueError(
                f"data: {entry.shard}:{entry.name} is of class {found}, the model has {num_classes}"
            )
        samples.append((entry, found))
    return samples

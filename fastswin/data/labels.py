"""Labels files: which class each photo of a flat folder is.

    text    ``<path> <label>`` on every line, separated by spaces, a tab or a comma; one header
            line is skipped; Kaggle's ``<id>,<synset> <box> ...`` lines are read as well
    JSON    an object of path to label, or a list of such pairs

A label is a class index, a class name of the model, or an ImageNet synset. A path is relative to
the folder and may lack its suffix, as ImageNet's ids do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fastswin.data.class_names import synset_indices

#: Photos that are looked for.
SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"]
)

_SYNSET = re.compile(r"n\d{8}")


def read_labels(
    labels: str | Path, root: Path, num_classes: int, class_names: Sequence[str] = ()
) -> list[tuple[Path, int]]:
    """Paths and class indices in the file's order.

    Args:
        labels: the file; ``.json`` is read as JSON, anything else as text.
        root: folder that the paths are relative to.
        num_classes: classes of the model.
        class_names: their names.

    Raises:
        FileNotFoundError: no such file.
        ValueError: malformed or empty; the message names the line or entry.
    """
    labels = Path(labels)
    if not labels.is_file():
        raise FileNotFoundError(f"labels: {labels} is not a file")
    text = labels.read_text(encoding="utf-8")
    pairs = _from_json(text, labels) if labels.suffix == ".json" else _from_text(text, labels)
    known = {name: i for i, name in enumerate(class_names)}
    known |= synset_indices(num_classes)
    samples = []
    suffixes: dict[Path, str] = {}
    for number, (where, name, label) in enumerate(pairs):
        index = int(label) if label.isdigit() else known.get(label, -1)
        if not name or not 0 <= index < num_classes:
            if number == 0 and name and _is_header(name, label):
                continue
            raise ValueError(
                f"labels: {where}: expected '<path> <class index below {num_classes}, class name "
                f"or synset>', got {name!r} and {label!r}"
            )
        samples.append((_resolve(root / name, suffixes), index))
    if not samples:
        raise ValueError(f"labels: {labels} is empty")
    return samples


def _from_text(text: str, labels: Path) -> list[tuple[str, str, str]]:
    pairs = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line:
            continue
        if "\t" in line or "," in line:
            name, _, label = line.partition("\t" if "\t" in line else ",")
            if _SYNSET.match(label):  # Kaggle's solution: the synset, then boxes
                label = label.split()[0]
        else:
            name, _, label = line.rpartition(" ")
        pairs.append((f"{labels} line {number}", name.strip(), label.strip()))
    return pairs


def _from_json(text: str, labels: Path) -> list[tuple[str, str, str]]:
    try:
        content = json.loads(text)
        entries = list(content.items()) if isinstance(content, dict) else content
        return [
            (f"{labels} entry {number}", str(name), str(label))
            for number, (name, label) in enumerate(entries, start=1)
        ]
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"labels: {labels}: expected an object of path to label") from error


def _is_header(name: str, label: str) -> bool:
    """Words instead of a photo and its class."""
    return Path(name).suffix.lower() not in SUFFIXES and not re.search(r"\d", name + label)


def _resolve(path: Path, suffixes: dict[Path, str]) -> Path:
    """The path with the suffix that its folder uses, where the file lists none."""
    if path.suffix.lower() in SUFFIXES:
        return path
    tried = [suffixes[path.parent]] if path.parent in suffixes else []
    for suffix in [*tried, ".JPEG", *sorted(SUFFIXES)]:
        candidate = path.with_name(path.name + suffix)
        if candidate.is_file():
            suffixes[path.parent] = suffix
            return candidate
    return path

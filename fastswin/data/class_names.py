"""What a class index is called: from the checkpoint, else ImageNet's names out of timm, else
``class 17``.

timm carries the names and synset ids (``n01440764``) of ImageNet-1k and of the 21,841-class
ImageNet-22k that Swin was pre-trained on, so nothing is fetched.
"""

from __future__ import annotations

import functools

#: timm's name of the label set with that many classes.
_IMAGENET_SUBSETS = {1000: "imagenet-1k", 21841: "imagenet-22k-ms"}


@functools.cache
def _imagenet(num_classes: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Synset ids and descriptions in index order, None where they are not on this machine."""
    subset = _IMAGENET_SUBSETS.get(num_classes)
    if subset is None:  # before timm, whose import takes 4 s
        return None
    try:
        from timm.data import ImageNetInfo
    except ImportError:
        return None
    try:
        info = ImageNetInfo(subset)
        synsets = tuple(info.label_names())
    except (AssertionError, FileNotFoundError, ValueError):
        return None
    if len(synsets) != num_classes:
        return None
    return synsets, tuple(info.index_to_description(i) for i in range(num_classes))


def class_names_for(num_classes: int) -> list[str]:
    """Names of a model's classes when the checkpoint holds none.

    Args:
        num_classes: width of the head; 1000 and 21841 are taken for ImageNet's label sets.

    Returns:
        One name per class; ``class <index>`` where timm is not installed or the set is unknown.
    """
    found = _imagenet(num_classes)
    return list(found[1]) if found else [f"class {i}" for i in range(num_classes)]


def synset_indices(num_classes: int) -> dict[str, int]:
    """Synset id to class index, empty where unknown."""
    found = _imagenet(num_classes)
    return {synset: i for i, synset in enumerate(found[0])} if found else {}

"""Which window and shift a map gets: the three conventions of the reference frameworks.

They agree wherever the map is larger than the window. Where one window covers the map, on a map
``[H, W]`` with a configured window ``w`` (and shift ``w // 2``):

    microsoft    min(H, W) <= w: the window becomes min(H, W) on both axes, no shift on either
    timm         per axis: the window becomes min(side, w), no shift on that axis
    torchvision  the window stays w and the map is padded; no shift on that axis

The choice decides the rows of the bias table, so weights carry their framework's convention.
Hugging Face follows ``microsoft`` for V1 and ``timm`` for V2.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Pair = tuple[int, int]
WindowConvention = Literal["microsoft", "timm", "torchvision"]


class Window(NamedTuple):
    """Window and cyclic shift of one block, ``(height, width)`` in tokens."""

    window_size: Pair
    shift_size: Pair


def to_pair(value: int | tuple[int, int] | list[int], name: str) -> Pair:
    """``(value, value)`` or the pair itself; ValueError names the argument otherwise."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(v, int) and v > 0 for v in pair):
        raise ValueError(f"{name} must be a positive integer or a pair of them, got {value!r}")
    return pair[0], pair[1]


def resolve_window(map_size: Pair, window_size: Pair, convention: WindowConvention) -> Window:
    """Window and shift of a shifted block when a stage is *built* for ``map_size``.

    Args:
        map_size: token grid ``(H, W)`` of the stage.
        window_size: configured window.
        convention: whose rule applies.
    """
    shift = (window_size[0] // 2, window_size[1] // 2)
    if convention == "microsoft":
        smallest = min(map_size)
        if smallest <= min(window_size):
            return Window((smallest, smallest), (0, 0))
        return Window(window_size, shift)
    shift = (
        0 if map_size[0] <= window_size[0] else shift[0],
        0 if map_size[1] <= window_size[1] else shift[1],
    )
    if convention == "timm":
        window_size = (min(map_size[0], window_size[0]), min(map_size[1], window_size[1]))
    return Window(window_size, shift)


def runtime_shift(
    map_size: Pair, window_size: Pair, convention: WindowConvention, *, stage: int
) -> Pair:
    """Shift of a shifted block whose stage was built with ``window_size`` on any map.

    Maps that are no multiple of the window are padded (bottom and right, before the shift).

    Raises:
        ValueError: the map is smaller than the window and the convention would need another bias
            table; the message names the stage and the smallest legal map.
    """
    if convention != "torchvision" and (
        map_size[0] < window_size[0] or map_size[1] < window_size[1]
    ):
        raise ValueError(
            f"stage {stage}: the token map {map_size[0]}x{map_size[1]} is smaller than the window "
            f"{window_size[0]}x{window_size[1]} this model was built with; use images that give at "
            f"least {window_size[0]}x{window_size[1]} tokens in that stage, build the model with "
            "image_size= of these images, or use window_convention='torchvision' (padding)"
        )
    if convention == "microsoft" and min(map_size) <= min(window_size):
        return 0, 0
    return (
        0 if map_size[0] <= window_size[0] else window_size[0] // 2,
        0 if map_size[1] <= window_size[1] else window_size[1] // 2,
    )

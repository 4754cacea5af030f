"""Attention of compute capability 9.0 in forms of its own, half precision.

    by windows   LayerNorm, qkv and attention of one head, proj by our product behind it
    whole        the half from LayerNorm to the residual, narrow stages
    long         attention alone, few windows of 129 to 160 tokens

The first two walk over several windows of 49 to 64 tokens. In the plan's words attention is "fused"
with a ``HopperWindowsConfig`` or a ``HopperWholeConfig``, qkv and, whole, proj "inside". They add
no bias that the library has left, so the stage's MLP is one kernel ("fused"), which leaves none.
Long windows change no word: "triton" with a ``HopperAttentionConfig``.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.attention_half.hopper_config import (
    HopperWindowsConfig,
    default_hopper_whole_config,
    default_hopper_windows_config,
    hopper_whole_blocker,
    hopper_windows_blocker,
)
from fastswin.ops.cluster_linear.choice import default_cluster_linear_config
from fastswin.ops.window_attention.hopper_config import (
    HopperAttentionConfig,
    hopper_attention_blocker,
)

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): fewest and most windows of a batch whose attention
#: is by heads over several windows; tiles, or None for the heuristic's.
HopperWindows = Mapping[tuple[int, int], tuple[int, int, HopperWindowsConfig | None]]

#: The engine's, as whole models on an H200 chose (docs/performance.md).
HOPPER_WINDOWS: HopperWindows = {
    (1, 192): (65, 128, HopperWindowsConfig(2, groups=1)),
    (1, 384): (17, 34, None),
}

#: By the same, fewest and most windows of a batch whose half is one kernel.
HopperWhole = Mapping[tuple[int, int], Pair]

#: The engine's: Swin-T takes 3.5 % less time with it at 8, 5 at 16 and 64, SwinV2-T 6 at 64,
#: SwinV2-B with windows of 8 3 at 8 and 8 at 32; Swin-B 1 to 8 and 32, at 64 as long.
HOPPER_WHOLE: HopperWhole = {
    (1, 96): (200, 1 << 30),
    (1, 128): (200, 1 << 30),
    (2, 96): (256, 1 << 30),
    (2, 128): (256, 1 << 30),
}

#: Most pairs of a window of 129 to 160 tokens and a head whose attention, apart from qkv, is
#: Hopper's of few windows (ops/window_attention/forward_hopper.py).
LONG_WINDOW_PAIRS = 128


def choose_long_windows(most_pairs: int, shape: StageShape, chosen: Choice) -> None:
    """Give one stage's attention apart the kernel of few long windows, where it takes them.

    Args:
        most_pairs: of a window and a head.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.
    """
    pairs = shape.windows * shape.num_heads
    if shape.version != 1 or chosen.words["attention"] != "triton" or pairs > most_pairs:
        return
    if hopper_attention_blocker(shape.C, shape.num_heads, shape.window_size, shape.map_size):
        return
    chosen.launch["attention"] = HopperAttentionConfig()
    chosen.reasons["attention"] = f"{pairs} pairs of a window and a head: three groups of queries"


def choose_whole(table: HopperWhole, shape: StageShape, chosen: Choice) -> bool:
    """Change one stage's attention where a table and the kernel take its whole half.

    Args:
        table: windows by version and channels.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.

    Returns:
        Whether attention is such a kernel.
    """
    windows = shape.windows
    fewest, most = table.get(shape.key, (1, 0))
    if not fewest <= windows <= most or not _takes_other_attention(chosen.words):
        return False
    tiles = default_hopper_whole_config(shape.C, windows, shape.multiprocessors)
    if blocker := hopper_whole_blocker(
        shape.C, shape.num_heads, shape.window_size, shape.map_size, tiles
    ):
        chosen.reasons["whole"] = blocker
        return False
    for layer in ("qkv", "proj"):
        chosen.launch.pop(layer, None)
    chosen.launch["attention"] = tiles
    chosen.words |= {"qkv": "inside", "attention": "fused", "proj": "inside"}
    why = f"{windows} windows: a program walks over {tiles.windows}, its weights in place"
    chosen.reasons |= {"qkv": why, "attention": why, "proj": why}
    return True


def choose_windows(table: HopperWindows, shape: StageShape, chosen: Choice) -> bool:
    """Change one stage's attention where a table and the kernel take it by heads over windows.

    Args:
        table: windows by version and channels, and tiles.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.

    Returns:
        Whether attention is such a kernel.
    """
    windows = shape.windows
    fewest, most, tiles = table.get(shape.key, (1, 0, None))
    if not fewest <= windows <= most or not _takes_other_attention(chosen.words):
        return False
    tiles = tiles or default_hopper_windows_config(shape.C, windows, shape.multiprocessors)
    if blocker := hopper_windows_blocker(
        shape.C, shape.num_heads, shape.window_size, shape.map_size, tiles
    ):
        chosen.reasons["windows"] = blocker
        return False
    chosen.launch.pop("qkv", None)
    chosen.launch["attention"] = tiles
    chosen.words |= {"qkv": "inside", "attention": "fused"}
    why = f"{windows} windows: a program takes one head of {tiles.windows}"
    chosen.reasons |= {"qkv": why, "attention": why}
    our_proj(shape, chosen)
    return True


def _takes_other_attention(words: dict[str, str]) -> bool:
    """Whether no bias comes from the MLP, and attention is apart or other cards' whole half."""
    apart = words["attention"] == "triton" or words["proj"] == "inside"
    return words["mlp"] == "fused" and apart


def our_proj(shape: StageShape, chosen: Choice) -> None:
    """proj by the product in clusters, where it is the library's or in attention's kernel."""
    tiles = default_cluster_linear_config(shape.M, shape.C, shape.C)
    if chosen.words["proj"] in ("library", "inside") and tiles is not None:
        chosen.words["proj"], chosen.launch["proj"] = "fused", tiles
        chosen.reasons["proj"] = "between kernels that are launched ahead"

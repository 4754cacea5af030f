"""Which stages run each block as one kernel, in clusters of programs (ops/swin_block).

In the plan's words: attention "block", and qkv, proj and mlp "inside". Few windows of narrow stages
on compute capability 9.0, in half precision, as whole models on an H200 chose: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastswin.ops.swin_block.config import swin_block_blocker

#: By (version of Swin, channels of the stage): most windows of a batch.
WholeBlocks = Mapping[tuple[int, int], int]

#: The engine's.
WHOLE_BLOCKS: WholeBlocks = {(1, 96): 128, (2, 96): 128, (2, 192): 32}

#: Layers inside a block's kernel, and those of separate kernels whose tiles it does not take.
_INSIDE = ("qkv", "attention", "proj", "mlp")
_APART = (*_INSIDE, "fc1", "fc2")


def choose_whole_block(
    table: WholeBlocks,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, Any],
    *,
    version: int,
    C: int,
    num_heads: int,
    hidden: int,
    window_size: tuple[int, int],
    map_size: tuple[int, int],
    windows: int,
) -> None:
    """Change one stage's words where the table and the kernel take its blocks.

    Args:
        table: most windows by version and channels.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        C, num_heads, hidden: channels, heads and units of the MLP.
        window_size, map_size: in tokens.
        windows: of the batch.
    """
    if windows > table.get((version, C), 0) or choice["attention"] != "triton":
        return
    if blocker := swin_block_blocker(C, num_heads, hidden, window_size, map_size):
        reasons["block"] = blocker
        return
    for layer in _INSIDE:
        choice[layer] = "inside"
        reasons[layer] = f"{windows} windows: a cluster of {num_heads} programs a window"
    for layer in _APART:
        launch.pop(layer, None)
    choice["attention"] = "block"

"""Which stages run each block as one kernel, in clusters of programs (ops/swin_block).

In the plan's words: attention "block", and qkv, proj and mlp "inside". Few windows of narrow stages
on compute capability 9.0, in half precision, as whole models on an H200 chose: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.swin_block.config import swin_block_blocker

#: By (version of Swin, channels of the stage): most windows of a batch.
WholeBlocks = Mapping[tuple[int, int], int]

#: The engine's.
WHOLE_BLOCKS: WholeBlocks = {(1, 96): 128, (2, 96): 128, (2, 192): 32}

#: Layers inside a block's kernel, and those of separate kernels whose tiles it does not take.
_INSIDE = ("qkv", "attention", "proj", "mlp")
_APART = (*_INSIDE, "fc1", "fc2")


def choose_whole_block(table: WholeBlocks, shape: StageShape, chosen: Choice) -> None:
    """Change one stage's words where the table and the kernel take its blocks.

    Args:
        table: most windows by version and channels.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.
    """
    if shape.windows > table.get(shape.key, 0) or chosen.words["attention"] != "triton":
        return
    if blocker := swin_block_blocker(
        shape.C, shape.num_heads, shape.hidden, shape.window_size, shape.map_size
    ):
        chosen.reasons["block"] = blocker
        return
    why = f"{shape.windows} windows: a cluster of {shape.num_heads} programs a window"
    for layer in _INSIDE:
        chosen.words[layer], chosen.reasons[layer] = "inside", why
    for layer in _APART:
        chosen.launch.pop(layer, None)
    chosen.words["attention"] = "block"

"""Which stages run LayerNorm, qkv and attention as one kernel (ops/attention_half), in which form.

    "heads"   one program per window and head, proj behind it: few windows
    "window"  one program per window, proj and residual inside: narrow stages, many windows

In the plan's words: attention "fused", qkv "inside", and with "window" proj "inside". What a table
of windows says is all that decides; :data:`FUSED_ATTENTION` is the engine's, measured on an H200 in
fp16 (docs/performance.md); bf16 moves the same bytes through the same instructions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.attention_half.config import (
    AttentionHalfConfig,
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
)


@dataclasses.dataclass(frozen=True)
class FusedRange:
    """Windows of a batch for which a form is taken.

    Attributes:
        form: "heads" or "window".
        fewest, most: windows in the batch, both included.
        config: tiles; None takes the operator's heuristic.
        tokens: of one window; None takes any that a kernel holds.
    """

    form: str
    fewest: int = 1
    most: int = 1 << 62
    config: AttentionHalfConfig | None = None
    tokens: int | None = None


#: By (version of Swin, channels of the stage): the first range with the batch's windows, and with
#: windows of its tokens, counts.
FusedAttention = Mapping[tuple[int, int], tuple[FusedRange, ...]]

#: Major compute capabilities whose shared memory, 227 KB, holds the table's tiles (up to 214 KB).
FUSED_CAPABILITIES = (9, 10)

#: Tokens of the windows that were measured: 7x7 in V1, 8x8 in V2.
V1, V2 = 49, 64

#: The engine's. Where a stage is missing its separate kernels were faster, or nothing was measured:
#: V1 by windows gains nothing at 96 and 128 channels from 2,048 windows up and loses at 192 from
#: 512, V2 at 192 from 1,024; V1 by heads loses at 192 channels and 64 windows.
FUSED_ATTENTION: FusedAttention = {
    (1, 96): (FusedRange("window", 200, 1100, WholeWindowConfig(4, 2, True), V1),),
    (1, 128): (FusedRange("window", 256, 1100, WholeWindowConfig(4, 2, True), V1),),
    (1, 192): (
        FusedRange("heads", 1, 24, HeadsConfig(64, 4, 5), V1),
        FusedRange("window", 65, 256, WholeWindowConfig(4, 3, True), V1),
    ),
    (1, 256): (FusedRange("heads", 1, 24, HeadsConfig(128, 4, 3), V1),),
    (1, 384): (
        FusedRange("heads", 1, 6, HeadsConfig(128, 4, 3), V1),
        FusedRange("heads", 7, 24, HeadsConfig(64, 4, 5), V1),
    ),
    (1, 512): (FusedRange("heads", 1, 6, HeadsConfig(128, 4, 3), V1),),
    (1, 768): (FusedRange("heads", 3, 6, HeadsConfig(128, 4, 3), V1),),
    (2, 96): (
        FusedRange("heads", 1, 96, HeadsConfig(32, 4, 3), V2),
        FusedRange("window", 256, config=WholeWindowConfig(4, 2), tokens=V2),
    ),
    (2, 192): (
        FusedRange("heads", 1, 24, HeadsConfig(64, 4, 5), V2),
        FusedRange("window", 65, 256, WholeWindowConfig(4, 3, True), V2),
    ),
    (2, 384): (
        FusedRange("heads", 1, 6, HeadsConfig(64, 4, 5), V2),
        FusedRange("heads", 25, 40, HeadsConfig(64, 4, 3), V2),
    ),
    (2, 768): (FusedRange("heads", 1, 2, HeadsConfig(64, 4, 5), V2),),
}


def choose_fused_attention(table: FusedAttention, shape: StageShape, chosen: Choice) -> None:
    """Change one stage's words and tiles where the table has a form for it.

    Args:
        table: forms by channels, windows and their tokens.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.
    """
    windows, tokens, C = shape.windows, shape.tokens, shape.C
    fitting = (r for r in table.get(shape.key, ()) if r.tokens in (None, tokens))
    found = next((r for r in fitting if r.fewest <= windows <= r.most), None)
    if found is None or chosen.words["attention"] != "triton":
        return
    whole = found.form == "window"
    values = math.prod(shape.map_size) * C
    blocker = attention_half_blocker(C, shape.num_heads, tokens, whole, values, found.config)
    if blocker is not None:
        chosen.reasons["fused attention"] = blocker
        return
    inside = ("qkv", "attention", "proj") if whole else ("qkv", "attention")
    why = f"{windows} windows: one kernel per window" + ("" if whole else " and head")
    for layer in inside:
        chosen.words[layer], chosen.reasons[layer] = "inside", why
        chosen.launch.pop(layer, None)
    chosen.words["attention"] = "fused"
    if found.config is not None:
        chosen.launch["attention"] = found.config

"""Which stages run LayerNorm, qkv and attention as one kernel, or more of a block with them.

    "heads"   one program per window and head, proj behind it: few windows (ops/attention_half)
    "window"  one program per window, proj and residual inside: narrow stages, many windows
    "block"   one program per window, the MLP half inside, too: the narrowest (ops/swin_block)

In the plan's words: attention "fused", qkv "inside", with "window" proj "inside", with "block" proj
and mlp. What tables of windows say is all that decides; :data:`FUSED_ATTENTION` and
:data:`WHOLE_BLOCKS`, which is asked first, are the engine's, measured on an H200 in fp16
(docs/performance.md); bf16 moves the same bytes through the same instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fastswin.ops.attention_half.config import (
    AttentionHalfConfig,
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
)
from fastswin.ops.swin_block.config import SwinBlockConfig, swin_block_blocker


@dataclasses.dataclass(frozen=True)
class FusedRange:
    """Windows of a batch for which a form is taken.

    Attributes:
        form: "heads", "window" or "block".
        fewest, most: windows in the batch, both included.
        config: tiles; None takes the operator's heuristic.
        tokens: of one window; None takes any that a kernel holds.
    """

    form: str
    fewest: int = 1
    most: int = 1 << 62
    config: AttentionHalfConfig | SwinBlockConfig | None = None
    tokens: int | None = None


#: By (version of Swin, channels of the stage): the first range with the batch's windows, and with
#: windows of its tokens, counts.
FusedAttention = Mapping[tuple[int, int], tuple[FusedRange, ...]]

#: Major compute capabilities whose shared memory, 227 KB, holds the table's tiles (up to 214 KB).
FUSED_CAPABILITIES = (9, 10)

#: Tokens of the windows that were measured: 7x7 in V1, 8x8 in V2.
V1, V2 = 49, 64

#: The engine's. Where a stage is missing its separate kernels were faster, or nothing was measured:
#: V1 by windows gains nothing at 96 channels from 2,048 windows up and loses at 192 from 512, V2 at
#: 192 from 1,024; V1 by heads loses at 192 channels and 64 windows.
FUSED_ATTENTION: FusedAttention = {
    (1, 96): (FusedRange("window", 200, 1100, WholeWindowConfig(4, 2, True), V1),),
    (1, 128): (FusedRange("window", 256, config=WholeWindowConfig(4, 2, True), tokens=V1),),
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


#: Blocks in one kernel.
WHOLE_BLOCKS: FusedAttention = {}


def choose_fused_attention(
    tables: Sequence[FusedAttention],
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, Any],
    *,
    version: int,
    C: int,
    num_heads: int,
    hidden: int,
    tokens: int,
    windows: int,
    map_tokens: int,
) -> None:
    """Change one stage's words and tiles where a table has a form for it.

    Args:
        tables: forms by channels, windows and their tokens; the first that fits is taken.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        C, num_heads, hidden: channels, heads and hidden units of the MLP.
        tokens: of one window, ``windows`` of the batch, ``map_tokens`` of one image.
    """
    if choice["attention"] != "triton":
        return
    ranges = (r for table in tables for r in table.get((version, C), ()))
    fitting = (r for r in ranges if r.tokens in (None, tokens))
    for found in (r for r in fitting if r.fewest <= windows <= r.most):
        blocker = blocker_of(found, C, num_heads, tokens, hidden, map_tokens * C)
        if blocker is not None:
            reasons["fused attention"] = blocker
            continue
        why = f"{windows} windows: one program per window" + (
            " and head" if found.form == "heads" else ""
        )
        for layer in _INSIDE[found.form]:
            choice[layer], reasons[layer] = "inside", why
        for layer in _APART[found.form]:
            launch.pop(layer, None)
        choice["attention"] = "fused"
        if found.config is not None:
            launch["attention"] = found.config
        return


#: Layers of the plan that a form computes, and those of a separate kernel whose tiles it does not
#: take.
_INSIDE = {
    "heads": ("qkv", "attention"),
    "window": ("qkv", "attention", "proj"),
    "block": ("qkv", "attention", "proj", "mlp"),
}
_APART = _INSIDE | {"block": (*_INSIDE["block"], "fc1", "fc2")}


def blocker_of(
    form: FusedRange, C: int, num_heads: int, tokens: int, hidden: int, map_elements: int
) -> str | None:
    """Why no kernel of this form holds such a stage, None where one does."""
    config = form.config
    if form.form == "block":
        assert config is None or isinstance(config, SwinBlockConfig)
        return swin_block_blocker(C, num_heads, tokens, hidden, map_elements, config)
    assert not isinstance(config, SwinBlockConfig)
    whole = form.form == "window"
    return attention_half_blocker(C, num_heads, tokens, whole, map_elements, config)

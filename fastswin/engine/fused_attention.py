"""Which stages run LayerNorm, qkv and attention as one kernel (ops/attention_half), in which form.

    "heads"   one program per window and head, proj behind it: few windows
    "window"  one program per window, proj and residual inside: narrow stages, many windows

In the plan's words: attention "fused", qkv "inside", and with "window" proj "inside". What a table
of windows says is all that decides; :data:`FUSED_ATTENTION` is the engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastswin.ops.attention_half.config import AttentionHalfConfig, attention_half_blocker


@dataclasses.dataclass(frozen=True)
class FusedRange:
    """Windows of a batch for which a form is taken.

    Attributes:
        form: "heads" or "window".
        fewest, most: windows in the batch, both included.
        config: tiles; None takes the operator's heuristic.
    """

    form: str
    fewest: int = 1
    most: int = 1 << 62
    config: AttentionHalfConfig | None = None


#: By (version of Swin, channels of the stage): the first range with the batch's windows counts.
FusedAttention = Mapping[tuple[int, int], tuple[FusedRange, ...]]

#: The engine's: single halves have been measured (docs/performance.md), whole models have not, so
#: every stage keeps its separate kernels.
FUSED_ATTENTION: FusedAttention = {}


def choose_fused_attention(
    table: FusedAttention,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, Any],
    *,
    version: int,
    C: int,
    num_heads: int,
    tokens: int,
    windows: int,
    map_tokens: int,
) -> None:
    """Change one stage's words and tiles where the table has a form for it.

    Args:
        table: forms by channels and windows.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        C, num_heads: channels and heads.
        tokens: of one window, ``windows`` of the batch, ``map_tokens`` of one image.
    """
    ranges = table.get((version, C), ())
    found = next((r for r in ranges if r.fewest <= windows <= r.most), None)
    if found is None or choice["attention"] != "triton":
        return
    whole = found.form == "window"
    blocker = attention_half_blocker(C, num_heads, tokens, whole, map_tokens * C, found.config)
    if blocker is not None:
        reasons["fused attention"] = blocker
        return
    inside = ("qkv", "attention", "proj") if whole else ("qkv", "attention")
    why = f"{windows} windows: one kernel per window" + ("" if whole else " and head")
    for layer in inside:
        choice[layer], reasons[layer] = "inside", why
        launch.pop(layer, None)
    choice["attention"] = "fused"
    if found.config is not None:
        launch["attention"] = found.config

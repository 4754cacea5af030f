"""Compile attention of few long windows for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from fastswin.ops.window_attention.launch_hopper import hopper_attention_fwd
from fastswin.testing import aot

#: Channels, heads, map and window of the published stages' extremes, and two windows between.
SELECTED = (
    (256, 8, (48, 48), (12, 12)),
    (768, 24, (24, 24), (12, 12)),
    (1536, 48, (12, 12), (12, 12)),
    (128, 4, (16, 40), (8, 20)),
)


def main() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for C, heads, size, window in SELECTED:
            tokens = window[0] * window[1]
            padded = 144 if tokens <= 144 else 160
            qkv = torch.empty(1, *size, 3 * C, dtype=dtype, device="meta")
            table = torch.empty(4, heads, padded, padded, dtype=dtype, device="meta")
            shift = (0, 0) if size == window else (window[0] // 2, window[1] // 2)
            with aot.record_launches() as launches:
                hopper_attention_fwd(qkv, table, 0.2, heads, window, shift, pdl=True)
            for launch in launches:
                compiled = dataclasses.asdict(aot.compile_launch(launch, 90))
                compiled["fills_with_zeros"] = aot.fills_with_zeros(launch, 90)
                print(json.dumps(compiled), flush=True)


if __name__ == "__main__":
    main()

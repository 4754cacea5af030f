"""Compile products with the LayerNorm behind them for one GPU generation; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Its argument
is the capability, 90 for 9.0.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from unittest import mock

import torch

from fastswin.engine.whole_rows import MEASURED, WHOLE_ROWS
from fastswin.ops.linear_norm import forward
from fastswin.ops.linear_norm.config import LinearNormConfig
from fastswin.testing.aot import binary_identity, compile_launch, record_launches

HALF, FORMATS = torch.float16, {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

#: (channels, product, stored, a step a row) with default tiles, by capability.
SELECTED = {
    80: ((128, "wide", "wide", False),),
    86: ((512, "wide", "wide", False),),
    89: ((512, "wide", "wide", False),),
    90: (),
}


def launch(
    C: int, product: str, stored: str, tokens: bool, config: LinearNormConfig | None
) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    operand, kept = FORMATS.get(product, HALF), FORMATS.get(stored, HALF)
    stream = empty(6272, C, dtype=HALF)
    forward.linear_add_norm_fwd(
        empty(6272, C, dtype=operand), empty(C, C, dtype=operand),
        None if product == "wide" else empty(C), empty(C), stream, 1e-5, stream,
        empty(6272, C, dtype=kept), None if tokens or stored == "wide" else empty(1),
        empty(6272) if tokens else None, config, pdl=not tokens,
    )  # fmt: skip


if __name__ == "__main__":
    target = int(sys.argv[1])
    capability = mock.patch.object(forward, "device_capability", return_value=divmod(target, 10))
    with capability, record_launches() as launches:
        for problem in SELECTED[target]:
            launch(*problem, None)
        if target == 90:  # what the engine's tables list
            for (_, C, product, stored), ranges in (MEASURED | WHOLE_ROWS).items():
                for found in ranges:
                    launch(C, product, stored, False, found.config)
    for one in {binary_identity(one): one for one in launches}.values():
        print(json.dumps(dataclasses.asdict(compile_launch(one, target))), flush=True)

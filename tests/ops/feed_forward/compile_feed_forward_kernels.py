"""Compile the feed-forward layer's kernels for one GPU generation; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from fastswin.ops.feed_forward.backward import feed_forward_bwd
from fastswin.ops.feed_forward.config import FeedForwardConfig, default_config
from fastswin.ops.feed_forward.forward import feed_forward_fwd
from fastswin.ops.feed_forward.register import KEEP_NOTHING, KEEP_PRE
from fastswin.testing.aot import Launch, compile_launch, record_launches


def launches_of(
    rows: int, C: int, config: FeedForwardConfig, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    """Both directions with every gradient, as the launchers launch them."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    x, fc1, fc2 = empty(rows, C), empty(4 * C, C), empty(C, 4 * C)
    bias = torch.empty(4 * C, dtype=torch.float32, device="meta")
    with record_launches() as found:
        _, pre, _ = feed_forward_fwd(
            x, fc1, bias, fc2, KEEP_NOTHING if config.fused else KEEP_PRE, config
        )
        feed_forward_bwd(
            x, x, None if config.fused else pre, None, fc1, bias, fc2, [True] * 4, torch.float32,
            config,
        )  # fmt: skip
    return [launch for launch in found if not launch.name.startswith("_sum")]


def main(capability: int, widths: list[int]) -> None:
    for C in widths:
        config = default_config(C, 4 * C, C, torch.bfloat16, divmod(capability, 10))
        for launch in launches_of(32 * 56 * 56, C, config):
            compiled = dataclasses.asdict(compile_launch(launch, capability))
            print(json.dumps(compiled | {"C": C}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(width) for width in sys.argv[2].split(",")])

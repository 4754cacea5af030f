"""Compile the cluster kernel's forms for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import torch

from fastswin.ops.swin_block.config import HEAD_DIM, tail_bytes
from fastswin.ops.swin_block.launch import swin_block_fwd
from fastswin.ops.swin_block.packing import pack_block
from fastswin.testing.aot import Launch, compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def block(dtype: str, heads: int, version: int, window: int) -> Launch:
    """A shifted block as its launcher launches it, in place and ahead."""
    C, side = heads * HEAD_DIM, 8 * window
    x, vector = empty(dtype, 1, side, side, C), empty("fp32", C)
    norm = (vector, vector) if version == 2 else None
    weights = pack_block(
        (empty(dtype, 3 * C, C), empty("fp32", 3 * C)), (empty(dtype, C, C), vector),
        (empty(dtype, 4 * C, C), empty("fp32", 4 * C)), (empty(dtype, C, 4 * C), vector), norm,
        norm,
    )  # fmt: skip
    head_scale = empty("fp32", heads) if version == 2 else None
    with record_launches() as found:
        swin_block_fwd(
            x, weights, empty("fp32", 4, heads, 64, 64), head_scale, HEAD_DIM**-0.5,
            (window, window), (window // 2, window // 2), 1e-5, x, pdl=True,
        )  # fmt: skip
    return found[0]


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")


def forms() -> Iterator[tuple[dict, Launch]]:
    """Every form with what describes it: the windows of the published models in fp16, of V1's or
    V2's own size in bf16."""
    for heads, version, dtype in itertools.product((2, 3, 4, 6), (1, 2), DTYPES):
        for window in (7, 8):
            if dtype == "fp16" or window == 6 + version:
                about = {"heads": heads, "version": version, "dtype": dtype, "window": window}
                yield about, block(dtype, heads, version, window)


if __name__ == "__main__":
    for about, launch in forms():
        compiled = dataclasses.asdict(compile_launch(launch, 90))
        tail = tail_bytes(about["heads"], about["window"] ** 2)
        print(json.dumps(compiled | about | {"tail_bytes": tail}), flush=True)

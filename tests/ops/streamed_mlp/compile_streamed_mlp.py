"""Compile forms of the streamed MLP for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import torch

from fastswin.ops.streamed_mlp.config import ROUND_US, StreamedMlpConfig, config_blocker
from fastswin.ops.streamed_mlp.launch import streamed_mlp_fwd
from fastswin.testing.aot import Launch, compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Rows of Swin-T's second stage at batch 32.
M = 25088


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")


def recorded(config: StreamedMlpConfig, C: int, dtype: str, behind: bool, offset: bool) -> Launch:
    """The launch of one form, ahead of time, in place."""
    x, vector = empty(dtype, M, C), empty("fp32", C)
    fc1 = empty(dtype, 4 * C, C), empty("fp32", 4 * C)
    fc2 = empty(dtype, C, 4 * C), vector
    norm = (vector, vector) if behind else None
    with record_launches() as found:
        streamed_mlp_fwd(x, fc1, fc2, norm, vector if offset else None, 1e-5, x, config, pdl=True)
    return found[0]


if __name__ == "__main__":
    for C, tiles in ROUND_US.items():
        for config, behind in itertools.product(tiles, (False, True)):
            for dtype, offset in (("fp16", False), ("bf16", True)):
                if offset and behind != (config.groups == 3):  # each form once
                    continue
                assert config_blocker(config, M, C, 4 * C) is None
                launch = recorded(config, C, dtype, behind, offset)
                about = {"C": C, "dtype": dtype, "behind": behind, "offset": offset}
                about["tail_bytes"] = config.tail_bytes(C)
                about["counted"] = config.shared_bytes(C, 4 * C, behind)
                compiled = dataclasses.asdict(compile_launch(launch, 90))
                print(json.dumps(compiled | about | dataclasses.asdict(config)), flush=True)

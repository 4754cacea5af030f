"""Compile forms of the MLP in clusters for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import re

import torch

from fastswin.ops.cluster_mlp.config import ClusterMlpConfig, config_blocker
from fastswin.ops.cluster_mlp.launch import cluster_mlp_fwd
from fastswin.testing import aot
from fastswin.testing.aot import Launch, compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Rows, channels, rows of a cluster, programs, dtype, and that statistics are left, that V2's norm
#: stands behind, or that x lacks its writer's bias.
FORMS = (
    (1568, 384, 128, 8, "fp16", "plain"),
    (1568, 384, 128, 8, "bf16", "left"),
    (2048, 384, 128, 8, "fp16", "post-norm"),
    (1568, 512, 128, 8, "fp16", "left"),
    (784, 384, 64, 8, "fp16", "left"),
    (1568, 384, 128, 8, "fp16", "offset"),
    (1568, 512, 128, 8, "bf16", "offset"),
    (784, 256, 64, 4, "bf16", "left"),
    (392, 768, 64, 16, "fp16", "left"),
)


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")


def recorded(M: int, C: int, config: ClusterMlpConfig, dtype: str, form: str) -> Launch:
    """The launch of one form, ahead of time."""
    behind = form == "post-norm"
    with record_launches() as found:
        cluster_mlp_fwd(
            empty(dtype, M, C), empty(dtype, config.programs * config.tiles(C) * 128, 64),
            None if behind else empty("fp32", 4 * C), empty("fp32", 4 * C), empty("fp32", C), 1e-5,
            empty(dtype, M, C), config, True,
            empty("fp32", 2, C // 128, M) if form == "left" else None,
            (empty("fp32", C), empty("fp32", C)) if behind else None,
            empty(dtype, C) if form == "offset" else None,
        )  # fmt: skip
    return found[0]


def partitions(ptx: str) -> dict[str, int]:
    """Registers of the threads that multiply, and where they meet from the first product on."""
    lines = ptx.splitlines()
    products = [i for i, line in enumerate(lines) if "wgmma.mma_async" in line]
    after = next(i for i in range(products[-1], len(lines)) if "barrier.sync" in lines[i])
    meetings = sum("bar.sync" in line for line in lines[products[0] : after])
    registers = max(map(int, re.findall(r"setmaxnreg\.inc\S+\s+(\d+)", ptx)))
    return {"meetings": meetings, "most_registers": registers}


if __name__ == "__main__":
    for M, C, block_m, programs, dtype, form in FORMS:
        config = ClusterMlpConfig(block_m, programs)
        assert config_blocker(config, M, C, 4 * C) is None
        launch = recorded(M, C, config, dtype, form)
        compiled = dataclasses.asdict(compile_launch(launch, 90))
        compiled |= partitions(aot._generated[aot.binary_identity(launch), 90][0])
        sized = C, form == "offset"
        about = {"C": C, "dtype": dtype, "form": form, "tail_bytes": config.tail_bytes(*sized)}
        about |= {"counted": config.shared_bytes(*sized), "ring": 16384 * config.slots(*sized)}
        print(json.dumps(compiled | about | dataclasses.asdict(config)), flush=True)

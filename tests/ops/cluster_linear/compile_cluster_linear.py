"""Compile forms of the product in clusters for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import torch

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, config_blocker, ring_slots
from fastswin.ops.cluster_linear.launch import cluster_linear_fwd
from fastswin.testing.aot import Launch, compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Tile, splits, channels of a step, dtype, form of the epilogue, and columns and inputs of the
#: product: each tile, each number of splits, each step and each form, of Swin's widest products
#: (rings that fill the memory); then narrow tiles and wide steps as they were measured.
FORMS = (
    (64, 64, 1, 64, "fp16", "qkv", 2304, 768),
    (64, 64, 2, 64, "bf16", "fc1", 3072, 768),
    (64, 64, 4, 64, "fp16", "proj", 768, 768),
    (64, 64, 8, 64, "fp16", "proj", 768, 3072),
    (64, 128, 1, 64, "bf16", "fc1", 4096, 1024),
    (64, 128, 8, 64, "bf16", "proj", 1024, 4096),
    (128, 64, 1, 64, "fp16", "fc1", 2048, 512),
    (128, 64, 2, 64, "fp16", "qkv", 1536, 512),
    (128, 128, 1, 64, "fp16", "fc1", 3072, 768),
    (128, 128, 4, 64, "bf16", "proj", 768, 3072),
    (128, 128, 8, 64, "fp16", "fc1", 3072, 1536),
    (64, 64, 1, 64, "bf16", "post-norm", 768, 768),
    (64, 64, 2, 64, "fp16", "post-norm", 192, 768),
    (64, 128, 4, 64, "fp16", "post-norm", 384, 1536),
    (32, 64, 1, 128, "fp16", "fc1", 1536, 384),
    (32, 64, 2, 256, "bf16", "proj", 512, 2048),
    (16, 64, 1, 64, "fp16", "proj", 384, 384),
    (16, 128, 2, 128, "bf16", "qkv", 1152, 768),
    (64, 64, 1, 256, "bf16", "fc1", 3072, 768),
    (64, 64, 2, 128, "fp16", "post-norm", 512, 2048),
)


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")


def product(config: ClusterLinearConfig, dtype: str, form: str, N: int, K: int) -> Launch:
    """196 rows as the engine has them: qkv and fc1 with a norm behind, proj onto the stream, and
    V2's proj, whose results are normalised."""
    M, stream, post_norm = 196, None, None
    x, weight, out = empty(dtype, M, K), empty(dtype, N, K), empty(dtype, M, N)
    stats = sums = written = None
    if form == "post-norm":
        stream, post_norm = out, (empty("fp32", N), empty("fp32", N))
    elif form == "proj":
        stream, written = out, empty("fp32", 2, N // config.block_n, M)
    else:
        stats, sums = empty("fp32", 2, K // 64, M), empty("fp32", N)
    with record_launches() as found:
        cluster_linear_fwd(
            x, weight, empty("fp32", N), "gelu" if form == "fc1" else None,
            1e-5, stream, out, config, True, stats, sums, written, post_norm,
        )  # fmt: skip
    return found[0]


def forms() -> Iterator[tuple[dict, Launch]]:
    """Every form with what describes it."""
    for block_m, block_n, splits, block_k, dtype, form, N, K in FORMS:
        row = N, form == "post-norm"
        slots = ring_slots(block_m, block_n, splits, K, *row, block_k)
        config = ClusterLinearConfig(block_m, block_n, splits, slots, block_k)
        assert config_blocker(config, 196, N, K, row[1]) is None
        about = {"form": form, "dtype": dtype, "steps": config.steps(K)}
        about |= {"tail_bytes": config.tail_bytes(*row), "counted": config.shared_bytes(*row)}
        yield about | dataclasses.asdict(config), product(config, dtype, form, N, K)


if __name__ == "__main__":
    for about, launch in forms():
        compiled = dataclasses.asdict(compile_launch(launch, 90))
        print(json.dumps(compiled | about), flush=True)

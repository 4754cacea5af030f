"""Compile forms of the product in clusters for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator

import torch

from fastswin.ops.cluster_linear import ring
from fastswin.ops.cluster_linear.config import (
    ClusterLinearConfig,
    config_blocker,
    ring_slots,
)
from fastswin.ops.cluster_linear.launch import cluster_linear_fwd
from fastswin.testing import aot
from fastswin.testing.aot import Launch, compile_launch, record_launches

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Tile, splits, channels of a step, dtype, form of the epilogue, columns and inputs of the product,
#: tiles of rows and of columns that share, slots: each tile, each number of splits, each step and
#: each form, of Swin's widest products (rings that fill the memory); narrow tiles and wide steps as
#: they were measured; then shares, shorter rings, and rings of one step, where memory is scarcest
#: for what the compiler adds behind the products.
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
    (64, 128, 1, 64, "fp16", "fc1", 3072, 768, 2, 4),
    (64, 128, 4, 64, "bf16", "proj", 768, 3072, 2, 1),
    (64, 128, 2, 64, "fp16", "proj", 768, 3072, 2, 2),
    (128, 64, 4, 64, "bf16", "qkv", 1536, 1024, 1, 4),
    (32, 64, 1, 128, "bf16", "proj", 512, 512, 4, 2),
    (64, 64, 1, 64, "fp16", "post-norm", 512, 512, 1, 8),
    (128, 128, 1, 64, "fp16", "fc1", 3072, 768, 1, 1, 5),
    (64, 128, 2, 64, "fp16", "proj", 768, 3072, 1, 1, 6),
    (64, 128, 1, 64, "bf16", "qkv", 4608, 1536, 3, 1, 6),
    (64, 64, 4, 64, "fp16", "proj", 1536, 6144, 1, 1, 10),
    (64, 64, 2, 64, "bf16", "qkv", 192, 128),
    (64, 128, 1, 64, "fp16", "proj", 128, 64),
    (128, 64, 2, 64, "bf16", "qkv", 384, 128),
    (128, 64, 1, 64, "fp16", "fc1", 256, 64),
    (128, 128, 1, 64, "fp16", "proj", 128, 64),
    (128, 128, 2, 64, "bf16", "fc1", 512, 128),
    (32, 128, 1, 64, "fp16", "qkv", 384, 64),
    (32, 64, 2, 64, "bf16", "proj", 128, 128),
    (16, 64, 1, 64, "bf16", "fc1", 256, 64),
    (32, 128, 1, 128, "bf16", "fc1", 1024, 256),
    (64, 64, 1, 64, "fp16", "post-norm", 128, 64),
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
    for block_m, block_n, splits, block_k, dtype, form, N, K, *more in FORMS:
        row = N, form == "post-norm"
        slots = more[2] if len(more) > 2 else ring_slots(block_m, block_n, splits, K, *row, block_k)
        config = ClusterLinearConfig(block_m, block_n, splits, slots, block_k, *more[:2])
        assert config_blocker(config, 196, N, K, row[1]) is None
        about = {"form": form, "dtype": dtype, "steps": config.steps(K)}
        about |= {"tail_bytes": config.tail_bytes(*row), "counted": config.shared_bytes(*row)}
        about |= {"ring_bytes": config.ring_bytes}
        yield about | dataclasses.asdict(config), product(config, dtype, form, N, K)


def descriptors(ptx: str) -> dict[str, str]:
    """The kernel's parameters that the names of x's and the weight's descriptors have in PTX."""
    names = {"x": ring.parameter(ring.X), "weight": ring.parameter(ring.WEIGHT)}
    return {
        f"{operand}_parameter": re.search(rf"^\s*(\.param .*\b{name}\b[^,\n]*)", ptx, re.M)[1]
        for operand, name in names.items()
    }


def stores_under_way(ptx: str) -> int:
    """Stores to shared memory between the first product and the wait for the last one.

    What the compiler stores, when it lets threads of several warps tell each other something, lies
    in memory that it takes for free: that of the ring, once no product behind uses it.
    """
    first, last = ptx.index("wgmma.mma_async"), ptx.rindex("wgmma.wait_group.sync.aligned 0")
    return len(re.findall(r"^\s*(?:@\S+ )?(?:st\.shared|stmatrix)", ptx[first:last], re.M))


if __name__ == "__main__":
    for about, launch in forms():
        compiled = dataclasses.asdict(compile_launch(launch, 90))
        ptx, *_ = aot._generated[aot.binary_identity(launch), 90]
        about |= descriptors(ptx) | {"stores_under_way": stores_under_way(ptx)}
        print(json.dumps(compiled | about), flush=True)

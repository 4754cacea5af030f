"""Compile what the launchers launch for one GPU generation; prints the assembler's words as JSON.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory. The launchers choose by compute capability and
multiprocessors, so both are those of the card that is compiled for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
from unittest import mock

import torch

from fastswin.engine.small_batch import ONE_SHOT_CHANNELS, small_stage
from fastswin.engine.tf32 import SPLIT_TILES, TF32_CAPABILITIES, TF32_PRODUCTS
from fastswin.ops.linear.config import OneShotConfig
from fastswin.ops.split_k.config import SplitKConfig
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.testing.aot import binary_identity, compile_launch, record_launches

#: Multiprocessors of a card of each generation: T4, A100, RTX 3090, L4, H100, RTX 5090.
MULTIPROCESSORS = {75: 40, 80: 108, 86: 82, 89: 58, 90: 132, 120: 170}

MODULES = {
    name: importlib.import_module(f"fastswin.ops.{name}.forward")
    for name in (
        "window_attention", "linear", "mlp", "layer_norm", "patch_embed", "patch_merging", "pool",
    )
}  # fmt: skip
MODULES["one_shot"] = importlib.import_module("fastswin.ops.linear.one_shot")
MODULES["split_k"] = importlib.import_module("fastswin.ops.split_k.forward")
MODULES["head"] = importlib.import_module("fastswin.ops.pool.head")

#: (channels, map side) of stages of Swin-T, B and L at 224 pixels.
STAGES = [(96, 56), (192, 28), (256, 28), (768, 7)]
#: (batch, channels, map side) of the sample: the widest fused stage, and few rows.
SAMPLE = [(32, 192, 28), (1, 768, 7)]
#: Widest stage with LayerNorm inside the GEMM, and with the fused MLP.
FUSED_QKV, FUSED_MLP = 384, 256


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def vector(n: int) -> torch.Tensor:
    return empty(n, dtype=torch.float32)


def attention(
    batch: int,
    window: int,
    version: int,
    dtype: torch.dtype,
    shifted: bool,
    *,
    tf32: bool = False,
    split: bool = False,
    training: bool = False,
) -> None:
    """Stage 1 of Swin-B (head_dim 32) with whole windows, 4 windows a side."""
    tokens = padded_tokens(window * window)
    side, heads = 4 * window, 4
    table = torch.float32 if training or dtype == torch.float32 else torch.float16
    stats = empty(16 * batch, heads, window**2, 2, dtype=torch.float32) if training else None
    shift = (window // 2,) * 2 if shifted else (0, 0)
    MODULES["window_attention"].window_attention_fwd(
        empty(batch, side, side, 3 * 32 * heads, dtype=dtype),
        empty(4 if shifted else 1, heads, tokens, tokens, dtype=table),
        vector(heads) if version == 2 else None, None, 32**-0.5, heads, (window, window), shift,
        tf32, row_stats=stats, pdl=True, split=split,
    )  # fmt: skip


def block_gemms(batch: int, C: int, side: int, dtype: torch.dtype) -> None:
    linear, M = MODULES["linear"], batch * side * side
    x, hidden = empty(M, C, dtype=dtype), empty(M, 4 * C, dtype=dtype)
    fc1, fc2 = empty(4 * C, C, dtype=dtype), empty(C, 4 * C, dtype=dtype)
    linear.linear_fwd(x, fc1, vector(4 * C), "gelu", None, None, pdl=True)
    if C <= FUSED_QKV:
        qkv = empty(3 * C, C, dtype=dtype)
        linear.layer_norm_linear_fwd(x, qkv, vector(3 * C), None, 1e-5, vector(C), None, pdl=True)
    if C <= FUSED_MLP:  # the split MLP, then the fused one, V1 and V2
        linear.layer_norm_linear_fwd(x, fc1, vector(4 * C), "gelu", 1e-5, vector(C), None, pdl=True)
        linear.linear_fwd(hidden, fc2, vector(C), None, x, None, pdl=True)
        mlp = MODULES["mlp"].mlp_fwd
        sized = (x, fc1, vector(4 * C), fc2, vector(C))
        mlp(*sized, None, None, vector(C), 1e-5, None, pdl=True)
        mlp(*sized, vector(C), vector(C), None, 1e-5, None, pdl=True)


def tf32_products(C: int, side: int) -> None:
    """fp32 operands on tensor cores (engine/tf32.py), batch 32."""
    linear, M = MODULES["linear"], 32 * side * side
    if linear.device_capability(torch.device("meta")) < (8, 0):  # the public functions refuse
        return
    x, fc1, fc2 = (empty(*shape, dtype=torch.float32) for shape in ((M, C), (4 * C, C), (C, 4 * C)))
    linear.linear_fwd(
        x, fc1, vector(4 * C), "gelu", None, None, pdl=True, input_precision="tf32"
    )  # fmt: skip
    if C > FUSED_MLP:
        return
    linear.layer_norm_linear_fwd(
        x, fc1[: 3 * C], vector(3 * C), None, 1e-5, vector(C), None, pdl=True,
        input_precision="tf32",
    )  # fmt: skip
    tiles = [None]
    if linear.device_capability(x.device)[0] in TF32_CAPABILITIES:
        tiles += [config for key, (_, config) in TF32_PRODUCTS.items() if key[1:] == ("mlp", C)]
        linear.linear_fwd(
            x, fc1, vector(4 * C), None, empty(M, 4 * C, dtype=torch.float32), None, SPLIT_TILES,
            pdl=True, input_precision="tf32x3",
        )  # fmt: skip
    for config in tiles:
        MODULES["mlp"].mlp_fwd(
            x, fc1, vector(4 * C), fc2, vector(C), None, None, vector(C), 1e-5, None, config,
            pdl=True,
        )  # fmt: skip


def few_rows(C: int, side: int, dtype: torch.dtype) -> None:
    """A stage at batch 1 as the engine's small-batch forms have it."""
    small, M = MODULES["one_shot"], side * side
    if small.device_capability(torch.device("meta")) < (8, 0):  # the public functions refuse
        return
    x = empty(M, C, dtype=dtype)
    normed = ((3 * C, None), (4 * C, "gelu")) if C <= ONE_SHOT_CHANNELS else ()
    for N, gelu in normed:
        small.one_shot_linear_fwd(
            x, empty(N, C, dtype=dtype), vector(N), gelu, 1e-5, vector(C), None, None, pdl=True
        )
    from_hopper = small.device_capability(x.device) >= (9, 0)
    launch = small_stage({}, {}, 1, M, C, 4 * C, small.multiprocessor_count(x.device))
    for name, K in (("proj", C), ("fc2", 4 * C)):
        config, rows, weight = launch.get(name), empty(M, K, dtype=dtype), empty(C, K, dtype=dtype)
        if isinstance(config, OneShotConfig):
            small.one_shot_linear_fwd(
                rows, weight, vector(C), None, None, None, x, x, config=config, pdl=True
            )
        elif isinstance(config, SplitKConfig) and from_hopper:  # in 8.x it spills kilobytes
            split = MODULES["split_k"]
            partials = split.split_k_linear_fwd(rows, weight, config, pdl=True)
            joins = (("none", None), ("pre", None), ("post", vector(C)))
            for norm, affine in joins if C in (192, 768) else joins[:1]:
                split.add_split_k_fwd(partials, x, vector(C), norm, affine, affine, 1e-5, pdl=True)
    if C in (192, 384) and from_hopper:  # LayerNorm behind the product, and who tells it about x
        stats = empty(2, C // 64, M)
        small.one_shot_linear_fwd(
            x, empty(C, C, dtype=dtype), vector(C), None, None, None, x, x,
            OneShotConfig(16 if C == 384 else 32, 64, 4), pdl=True, stats_out=stats,
        )  # fmt: skip
        small.one_shot_linear_fwd(
            x, empty(4 * C, C, dtype=dtype), vector(4 * C), "gelu", 1e-5, None, None, None,
            OneShotConfig(64, 64, 4), pdl=True, norm_stats=stats, weight_sums=vector(4 * C),
        )  # fmt: skip
    if C == 96:
        small.one_shot_linear_fwd(
            empty(1, side, side, C, dtype=dtype), empty(2 * C, 4 * C, dtype=dtype), vector(2 * C),
            None, 1e-5, vector(C), None, None, pdl=True, gather=True,
        )  # fmt: skip


def small_kernels(C: int, side: int, dtype: torch.dtype) -> None:
    x = empty(8, side, side, C, dtype=dtype)
    vectors = vector(C), vector(C)
    MODULES["layer_norm"].layer_norm_fwd(x, None, None, 1e-5, vector(C), None, None, pdl=True)
    MODULES["patch_merging"].gather_neighbours_fwd(x, 1e-5, vector(C), pdl=True)
    MODULES["pool"].norm_pool_fwd(x, *vectors, 1e-5, vector(C), pdl=True)
    head = empty(1000, C, dtype=dtype)
    MODULES["head"].norm_pool_head_fwd(x, *vectors, head, vector(1000), 1e-5, vector(C), pdl=True)


def embedding(C: int, dtype: torch.dtype) -> None:
    MODULES["patch_embed"].patch_embed_fwd(
        empty(8, 3, 224, 224, dtype=torch.float32), empty(C, 3, 4, 4, dtype=dtype), vector(C),
        vector(C), vector(C), 1e-5, dtype, True, "tf32x3" if dtype == torch.float32 else None,
    )  # fmt: skip


def record(selection: str) -> list:
    """Launches of a selection: "all" stages and batches, or a "sample" with every kernel."""
    half, wide = torch.float16, torch.float32
    every = selection == "all"
    with record_launches() as launches:
        for window, version in ((7, 1), (12, 1), (8, 2), (16, 2), (24, 2)):
            attention(32, window, version, half, shifted=True)
            if every:
                attention(1, window, version, half, shifted=False)
            if every or window in (7, 12):
                attention(32, window, version, wide, shifted=True)
        if every:
            attention(32, 12, 2, half, shifted=True)
            for window, version in ((12, 1), (12, 2), (16, 2), (24, 2)):
                attention(32, window, version, half, shifted=True, training=True)
        for batch, C, side in [(b, *s) for b in (1, 32) for s in STAGES] if every else SAMPLE:
            block_gemms(batch, C, side, half)
        for C in (96, 192) if every else (96,):
            embedding(C, half)
            generation = MODULES["patch_embed"].device_capability(torch.device("meta"))[0]
            if generation in TF32_CAPABILITIES:
                embedding(C, wide)
                attention(32, 7 if C == 96 else 8, 1 if C == 96 else 2, wide, True, split=True)
                attention(32, 12 if C == 96 else 16, 1 if C == 96 else 2, wide, True, tf32=True)
            tf32_products(C, 5376 // C)
        stages = ((96, 56), (128, 56), (192, 28), (256, 28), (384, 14), (512, 14), (768, 7))
        for C, side in stages if every else ((96, 56), (768, 7)):
            few_rows(C, side, half)
        for C, side in ((96, 56), (768, 7)) if every else ((192, 28),):
            small_kernels(C, side, half)
    return list({binary_identity(launch): launch for launch in launches}.values())


def run_as(capability: int) -> contextlib.ExitStack:
    """The launchers see this card instead of the interpreter's stand-in."""
    stack = contextlib.ExitStack()
    answers = {
        "device_capability": divmod(capability, 10),
        "multiprocessor_count": MULTIPROCESSORS[capability],
    }
    for module in MODULES.values():
        for question, answer in answers.items():
            if hasattr(module, question):
                stack.enter_context(mock.patch.object(module, question, return_value=answer))
    return stack


if __name__ == "__main__":
    target, chosen = int(sys.argv[1]), sys.argv[2]
    with run_as(target):
        recorded = record(chosen)
    part, parts = int(sys.argv[3]), int(sys.argv[4])
    for launch in recorded[part::parts]:
        compiled = dataclasses.asdict(compile_launch(launch, target))
        values = {k: v for k, v in launch.arguments.items() if k.isupper() and isinstance(v, int)}
        print(json.dumps({**compiled, "constants": values, "options": launch.options}), flush=True)

"""Compile the 8-bit kernels for one GPU generation; prints the assembler's words as JSON.

A program of its own: Triton decides once per process whether kernels are interpreted. Its argument
is the capability, 90 for 9.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from unittest import mock

import torch

from fastswin.ops.layer_norm.forward import layer_norm_fwd
from fastswin.ops.patch_merging.quantized import gather_quantize_fwd
from fastswin.ops.quantize.forward import quantize_fwd, quantize_per_token_fwd
from fastswin.ops.quantized_linear import forward as linear
from fastswin.ops.quantized_mlp import forward as quantized_mlp
from fastswin.ops.split_k.config import SplitKConfig, default_split_k_config
from fastswin.ops.split_k.forward import add_split_k_fwd, split_k_linear_fwd
from fastswin.ops.window_attention import forward as attention
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.testing.aot import compile_launch, record_launches

#: Multiprocessors of a card of each generation: A100, RTX 3090, L4, H100.
MULTIPROCESSORS = {80: 108, 86: 82, 89: 58, 90: 132}

#: What is compiled: cards with less shared memory take the kernels that need much.
SELECTED = {
    80: {torch.int8: "sample"},
    86: {torch.int8: "large"},
    89: {torch.float8_e4m3fn: "large"},
    90: {torch.int8: "all", torch.float8_e4m3fn: "sample"},
}

HALF, WIDE = torch.float16, torch.float32


def empty(*shape: int, dtype: torch.dtype = WIDE) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def gemm(
    M: int, N: int, K: int, dtype: torch.dtype, kind: str, rows: bool = False, pdl: bool = False
) -> None:
    """One layer as the engine calls it: qkv, fc1 or a residual one."""
    parts = {"qkv": 3, "fc1": 1}.get(kind)
    linear.quantized_linear_fwd(
        empty(M, K, dtype=dtype), empty(N, K, dtype=dtype), empty(N), empty(N),
        empty(M) if rows else None, "gelu" if kind == "fc1" else None,
        empty(M, N, dtype=HALF) if kind == "fc2" else None,
        None if parts is None else empty(parts), HALF if parts is None else dtype, None, pdl=pdl,
        ordered=parts is not None,
    )  # fmt: skip


def attend(
    window: int,
    dtype: torch.dtype,
    output: torch.dtype,
    cosine: bool,
    pdl: bool = False,
    head_dim: int = 32,
) -> None:
    side, heads, tokens = 4 * window, 4, padded_tokens(window * window)
    attention.window_attention_fwd(
        empty(32, side, side, 3 * head_dim * heads, dtype=dtype),
        empty(4, heads, tokens, tokens, dtype=WIDE if cosine else HALF),
        empty(heads) if cosine else None, None, 32**-0.5, heads, (window, window),
        (window // 2,) * 2, False, qkv_scale=None if dtype == HALF else empty(3),
        output_scale=None if output == HALF else empty(1), out_dtype=output, pdl=pdl,
    )  # fmt: skip


def mlp(M: int, C: int, dtype: torch.dtype) -> None:
    fc1, fc2 = empty(4 * C, C, dtype=dtype), empty(C, 4 * C, dtype=dtype)
    quantized_mlp.quantized_mlp_fwd(
        empty(M, C, dtype=HALF), fc1, empty(4 * C), empty(4 * C), fc2, empty(C), empty(C),
        empty(1), empty(1), empty(C), 1e-5, None,
    )  # fmt: skip


def record(dtype: torch.dtype, selection: str) -> list:
    """Launches of one format: "all" that Swin needs, a "sample" of every kernel, or the "large"."""
    with record_launches() as launches:
        gemm(25088, 1152, 384, dtype, "qkv")
        gemm(25088, 384, 1536, dtype, "fc2")
        attend(7, dtype, dtype, cosine=False)
        mlp(25088, 192, dtype)
        if selection == "large":
            return launches
        gemm(1, 15, 24, dtype, "head")
        x = empty(4, 28, 28, 192, dtype=HALF)
        out, rows = empty(4, 28, 28, 192, dtype=dtype), empty(4, 28, 28)
        layer_norm_fwd(x, None, None, 1e-5, empty(192), None, out, output_scale=empty(1))
        layer_norm_fwd(x, None, None, 1e-5, None, None, out, row_scale=rows)
        gather_quantize_fwd(x, 1e-5, empty(192), empty(1), dtype, empty(4, 14, 14))
        quantize_fwd(x, empty(3), dtype, None)
        narrow(dtype, linear.device_capability(x.device))
        quantize_per_token_fwd(x, dtype)
        if selection == "all":
            gemm(25088, 1536, 384, dtype, "fc1")
            gemm(100352, 288, 96, dtype, "qkv", rows=True)
            gemm(49, 768, 3072, dtype, "fc2")
            attend(24, dtype, dtype, cosine=True)
            gemm(100352, 576, 192, dtype, "qkv")
            gemm(1568, 768, 3072, dtype, "fc2")
            few_rows(dtype)
    return launches


def narrow(dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Sums shorter than the 32 that 8-bit tensor cores take; the interpreter takes any."""
    attend(2, dtype, dtype, cosine=False, head_dim=8)
    if capability < (9, 0):
        return
    for K, splits in ((192, 4), (16, 1)):  # parts of 32 + 16 channels, and one of 16
        config = SplitKConfig(splits, 32, 16, 4)
        split_k_linear_fwd(
            empty(33, K, dtype=dtype), empty(24, K, dtype=dtype), config, scale=empty(24)
        )


def few_rows(dtype: torch.dtype) -> None:
    """What a stage of few rows launches ahead; fc2 asks for the most lines of its weight."""
    gemm(49, 4608, 1536, dtype, "qkv", pdl=True)
    gemm(49, 1536, 6144, dtype, "fc2", pdl=True)
    gemm(49, 15, 24, dtype, "head", pdl=True)
    attend(7, HALF, dtype, cosine=False, pdl=True)
    x, out = empty(1, 14, 14, 384, dtype=HALF), empty(1, 14, 14, 384, dtype=dtype)
    layer_norm_fwd(x, None, None, 1e-5, None, None, out, output_scale=empty(1), pdl=True)
    gather_quantize_fwd(x, 1e-5, None, empty(1), dtype, empty(1, 7, 7), pdl=True)
    quantize_fwd(x, empty(1), dtype, None, pdl=True)
    quantize_per_token_fwd(x, dtype, pdl=True)
    for M, C, cut in ((196, 384, SplitKConfig(3, 64, 64, 4)), (49, 1536, None)):
        cut = cut or default_split_k_config(M, C, 4 * C, MULTIPROCESSORS[90])
        hidden, fc2 = empty(M, 4 * C, dtype=dtype), empty(C, 4 * C, dtype=dtype)
        partials = split_k_linear_fwd(hidden, fc2, cut, pdl=True, scale=empty(C))
        add_split_k_fwd(
            partials, empty(M, C, dtype=HALF), empty(C), "pre", None, None, 1e-5, pdl=True,
            output_scale=empty(1), dtype=dtype,
        )  # fmt: skip


def run_as(capability: int) -> contextlib.ExitStack:
    """The launchers see this card instead of the interpreter's stand-in."""
    stack = contextlib.ExitStack()
    answers = {
        "device_capability": divmod(capability, 10),
        "multiprocessor_count": MULTIPROCESSORS[capability],
    }
    for module in (linear, attention, quantized_mlp):
        for question in answers.keys() & vars(module):
            answer = answers[question]
            stack.enter_context(mock.patch.object(module, question, return_value=answer))
    return stack


if __name__ == "__main__":
    target = int(sys.argv[1])
    with run_as(target):
        recorded = [launch for f, which in SELECTED[target].items() for launch in record(f, which)]
    for launch in recorded:
        compiled = dataclasses.asdict(compile_launch(launch, target))
        values = {k: v for k, v in launch.arguments.items() if k.isupper() and isinstance(v, int)}
        print(json.dumps({**compiled, "constants": values, "options": launch.options}), flush=True)

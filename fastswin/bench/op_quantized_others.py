"""LayerNorm, merging, attention and the fused MLP in 8 bits, beside their fp16 forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastswin.bench.op_quantized_problems import FORMATS
from fastswin.ops.quantized_mlp.config import QuantizedMlpConfig, quantized_mlp_blocker
from fastswin.ops.window_attention.config import default_config
from fastswin.ops.window_attention.packing import pack_bias

Calls = dict[str, Callable[[], object]]

#: Images, map side and channels of stages that differ in what bounds their kernels.
STAGES = {
    "T1": (32, 56, 96), "T2": (32, 28, 192), "T3": (32, 14, 384), "B1": (32, 56, 128),
    "L1": (32, 56, 192), "L3": (32, 14, 768),
}  # fmt: skip

WINDOW = (7, 7)
HEAD_DIM = 32
EPS = 1e-5

#: Tiles of the fused MLP worth a try.
MLP_TILES = (
    QuantizedMlpConfig(64, 128, 4, 2, tma=True), QuantizedMlpConfig(64, 64, 4, 2, tma=True),
    QuantizedMlpConfig(64, 64, 4, 3, tma=True), QuantizedMlpConfig(128, 64, 8, 2, tma=True),
)  # fmt: skip

#: Multiprocessors that the heuristic is asked for.
MULTIPROCESSORS = 132


def other_calls(stage: str, formats: Sequence[str], device: torch.device) -> Calls:
    """Every operator and format of a stage by name; "meta" makes calls for compiling."""
    batch, side, C = STAGES[stage]
    x = torch.randn(batch, side, side, C, device=device).half()
    return _norms(x, formats) | _attentions(batch, side, C, device, formats) | _mlps(x, formats)


def _norms(x: torch.Tensor, formats: Sequence[str]) -> Calls:
    from fastswin.ops.layer_norm.forward import layer_norm_fwd
    from fastswin.ops.patch_merging.forward import gather_neighbours_fwd
    from fastswin.ops.patch_merging.quantized import gather_quantize_fwd
    from fastswin.ops.quantize.forward import quantize_fwd

    step = torch.full((1,), 0.03, device=x.device)
    offset = torch.full((x.shape[-1],), 0.1, device=x.device)
    calls: Calls = {
        "norm fp16": lambda: layer_norm_fwd(x, None, None, EPS, offset, None, None),
        "merge fp16": lambda: gather_neighbours_fwd(x, EPS, offset),
    }
    for name in formats:
        dtype = FORMATS[name]
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        rows = torch.empty(x.shape[:-1], device=x.device)

        def norm(out: torch.Tensor = out, **scales: Any) -> torch.Tensor:
            return layer_norm_fwd(x, None, None, EPS, offset, None, out, **scales)

        calls[f"norm {name}"] = lambda norm=norm: norm(output_scale=step)  # type: ignore[misc]
        calls[f"norm {name} token"] = lambda norm=norm, rows=rows: norm(row_scale=rows)  # type: ignore[misc]
        calls[f"merge {name}"] = lambda dtype=dtype: gather_quantize_fwd(  # type: ignore[misc]
            x, EPS, offset, step, dtype
        )
        calls[f"quantize {name}"] = lambda dtype=dtype: quantize_fwd(x, step, dtype, None)  # type: ignore[misc]
    return calls


def _mlps(x: torch.Tensor, formats: Sequence[str]) -> Calls:
    """The fused MLP in fp16, and in 8 bits with a few tiles; nothing where it does not apply."""
    from fastswin.ops.mlp.forward import mlp_fwd
    from fastswin.ops.quantized_mlp.forward import quantized_mlp_fwd

    C, device = x.shape[-1], x.device
    if quantized_mlp_blocker(C, 4 * C) is not None:
        return {}
    fc1, fc2 = (torch.randn(4 * C, C, device=device) * C**-0.5 for _ in range(2))
    long, short = (torch.full((n,), 0.01, device=device) for n in (4 * C, C))
    step, out = torch.full((1,), 0.03, device=device), torch.empty_like(x)
    half = fc1.half(), fc2.t().contiguous().half()
    calls: Calls = {
        "mlp fp16": lambda: mlp_fwd(x, half[0], long, half[1], short, None, None, short, EPS, out)
    }
    for name in formats:
        narrow = [(w.float() * 20).to(FORMATS[name]) for w in half]
        for config in MLP_TILES:
            calls[f"mlp {name} {config.block_m}x{config.block_h} s{config.num_stages}"] = (
                lambda w=narrow, config=config: quantized_mlp_fwd(  # type: ignore[misc]
                    x, w[0], long, long, w[1], short, short, step, step, short, EPS, out, config
                )
            )
    return calls


def _attentions(
    batch: int, side: int, C: int, device: torch.device, formats: Sequence[str]
) -> Calls:
    """fp16, then 8-bit q, k and v with fp16 and 8-bit output, and a few launch options."""
    from fastswin.ops.quantize.forward import quantize_fwd
    from fastswin.ops.window_attention.forward import window_attention_fwd

    heads, shift, tokens = C // HEAD_DIM, (3, 3), WINDOW[0] * WINDOW[1]
    qkv = torch.randn(batch, side, side, 3 * C, device=device).half()
    bias = torch.randn(heads, tokens, tokens, device=device)
    table = pack_bias(bias, heads, WINDOW, shift, device, torch.float16)
    windows = batch * (side // WINDOW[0]) ** 2
    base = default_config(windows, tokens, heads, HEAD_DIM, 1, MULTIPROCESSORS)
    qkv_step = torch.full((3,), 0.03, device=device)
    out_step = torch.full((1,), 0.02, device=device)

    def attend(x: torch.Tensor, config: Any = None, **steps: Any) -> torch.Tensor:
        return window_attention_fwd(
            x, table, None, None, HEAD_DIM**-0.5, heads, WINDOW, shift, False, config=config,
            **steps,
        )  # fmt: skip

    calls: Calls = {"attn fp16": lambda: attend(qkv)}
    for name in formats:
        dtype = FORMATS[name]
        if device.type == "meta":
            x = torch.empty(qkv.shape, dtype=dtype, device=device)
        else:
            x = quantize_fwd(qkv, qkv_step, dtype, None)
        narrow = {"qkv_scale": qkv_step, "output_scale": out_step, "out_dtype": dtype}
        wide = {"qkv_scale": qkv_step, "out_dtype": torch.float16}
        calls[f"attn {name}>fp16"] = lambda x=x, wide=wide: attend(x, **wide)  # type: ignore[misc]
        calls[f"attn {name}>{name}"] = lambda x=x, narrow=narrow: attend(x, **narrow)  # type: ignore[misc]
        calls[f"attn fp16>{name}"] = lambda dtype=dtype: attend(  # type: ignore[misc]
            qkv, output_scale=out_step, out_dtype=dtype
        )
        for per_program in sorted({1, 3, base.heads_per_program}):
            for stages in (2, 3):
                config = dataclasses.replace(base, heads_per_program=per_program, num_stages=stages)
                if heads % per_program or config == base:
                    continue
                calls[f"attn {name}>{name} h{per_program} s{stages}"] = (
                    lambda x=x, narrow=narrow, config=config: attend(x, config, **narrow)  # type: ignore[misc]
                )
    return calls

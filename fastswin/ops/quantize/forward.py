"""Rounding to 8 bits in Triton.

    x [M, C] wide -> q [M, C] of one byte       given steps, or one step a row

Memory bound: x read once, q (half or a quarter as many bytes) written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.launch import on_grid
from fastswin._triton.math import inverse_step, round_to_8_bits
from fastswin._triton.pdl import pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv, next_power_of_2
from fastswin.ops.quantize.reference import LARGEST, SMALLEST_STEP

#: Elements of one program with given steps: 16 a thread of 4 warps.
BLOCK = 2048


@triton.jit
def token_step(amax, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Steps of rows from their largest magnitudes: 1 for an all-zero row."""
    step = tl.maximum(tl.div_rn(amax, LARGEST), SMALLEST)
    step = tl.where(amax == 0.0, 1.0, step)
    return tl.where(amax == amax, step, amax)


@triton.jit
def row_amax_bits(x):
    """Largest magnitude of each fp32 row of ``[M, C]`` as int32 bits, which order like numbers.

    Those of NaN are the largest, so a row with NaN gives NaN.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _quantize_kernel(
    x_ptr, scale_ptr, out_ptr, elements, C, channels_each, BLOCK: tl.constexpr,
    ONE_STEP: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """BLOCK elements of a contiguous tensor."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    valid = at < elements
    if ONE_STEP:  # before x, so that no second wait for memory follows x's
        inverse = inverse_step(tl.load(scale_ptr))
    else:
        part = (at % C) // channels_each
        inverse = inverse_step(tl.load(scale_ptr + part, mask=valid, other=1.0))
    wait_for_previous(PDL)
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    q = round_to_8_bits(x * inverse, out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, q, mask=valid)


@triton.jit
def _quantize_per_token_kernel(
    x_ptr, out_ptr, row_scale_ptr, M, C,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """BLOCK_M whole rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_C)
    valid = (first + row < M)[:, None] & (column < C)[None, :]
    at = first * C + row[:, None] * C + column[None, :]
    wait_for_previous(PDL)
    x = tl.load(x_ptr + at, mask=valid, other=0.0).to(tl.float32)
    step = token_step(row_amax_bits(x).to(tl.float32, bitcast=True), LARGEST, SMALLEST)
    q = round_to_8_bits(x * tl.div_rn(1.0, step)[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, q, mask=valid)
    tl.store(row_scale_ptr + first + row, step, mask=first + row < M)


def quantize_fwd(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    pdl: bool = False,
) -> torch.Tensor:
    """Launch on ``x [..., C]``; see the public function."""
    x = x.contiguous()
    target = out
    if target is None or not target.is_contiguous():
        target = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        C, parts = x.shape[-1], scale.numel()
        with on_device(x.device):
            on_grid(_quantize_kernel, (cdiv(x.numel(), BLOCK),))(
                x, scale.contiguous(), target, x.numel(), C, C // parts, BLOCK=BLOCK,
                ONE_STEP=parts == 1, num_warps=4, **pdl_options(pdl, device_capability(x.device)),
            )  # fmt: skip
    return target if out is None or out is target else out.copy_(target)


def quantize_per_token_fwd(
    x: torch.Tensor, dtype: torch.dtype, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on ``x [..., C]``; see the public function."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    row_scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out, row_scale.fill_(1.0)
    C = x.shape[-1]
    block_c = next_power_of_2(C)
    block_m = max(1, min(16, BLOCK // block_c))
    with on_device(x.device):
        on_grid(_quantize_per_token_kernel, (cdiv(x.numel() // C, block_m),))(
            x, out, row_scale, x.numel() // C, C, BLOCK_M=block_m, BLOCK_C=block_c,
            LARGEST=LARGEST[dtype], SMALLEST=SMALLEST_STEP, num_warps=4,
            **pdl_options(pdl, device_capability(x.device)),
        )  # fmt: skip
    return out, row_scale

"""A product onto the residual stream, and the LayerNorm of the new stream, by whole rows in Triton.

    x [M, K]   weight [C, K]   scale, bias [C] fp32   residual, out [M, C]   normed [M, C]
    out = residual + (x @ weight.T) (* scale) + bias
    normed = (out - mean(out)) * rstd(out), as it is or rounded to 8 bits

A program owns BLOCK_M rows with all their columns, as PARTS equal parts, so what LayerNorm needs of
a row is in its registers when the products end: the stream is written once and not read again,
2 M K C FLOPs and (M K + K C) * itemsize + 3 M C * itemsize bytes. All programs walk over the same
weight at the same time. Statistics are those of the stream as it is stored, in fp32, the mean
first; equal parts share a layout of threads, so they are added up before threads exchange them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import device_capability, on_device
from fastswin._triton.math import inverse_step, round_to_8_bits, rows_to_8_bits
from fastswin._triton.pdl import launch_dependents, pdl_options, wait_for_previous
from fastswin._triton.tiles import cdiv
from fastswin.ops.linear_norm.config import LinearNormConfig, default_linear_norm_config
from fastswin.ops.quantize.forward import row_amax_bits, token_step
from fastswin.ops.quantize.reference import LARGEST, SMALLEST_STEP

#: Bytes that the base of a tensor must be a multiple of for the tensor copy engine.
TMA_ALIGNMENT = 16


@triton.jit
def _weight_tile(
    weight_ptr, weight_desc, start, K, PART: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """``[WIDTH, BLOCK_K]`` of one part of the output channels."""
    if weight_desc is not None:
        w = weight_desc.load([PART * WIDTH, start])
    else:
        col = PART * WIDTH + tl.arange(0, WIDTH)
        k = start + tl.arange(0, BLOCK_K)
        at = weight_ptr + col[:, None] * K + k[None, :]
        if EVEN_K:
            w = tl.load(at)
        else:
            w = tl.load(at, mask=(k < K)[None, :], other=0.0)
    return w


@triton.jit
def _first_sums(
    bias_ptr, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """What the sums of one part begin with: the bias where there is no scale behind them."""
    acc = tl.zeros([BLOCK_M, WIDTH], SUMS)
    if bias_ptr is not None:
        col = PART * WIDTH + tl.arange(0, WIDTH)
        acc += tl.load(bias_ptr + col).to(SUMS)[None, :]
    return acc


@triton.jit
def _residual_tile(
    residual_ptr, keep, PART: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    col = PART * WIDTH + tl.arange(0, WIDTH)
    at = tl.arange(0, BLOCK_M)[:, None] * C + col[None, :]
    return tl.load(residual_ptr + at, mask=keep, other=0.0)


@triton.jit
def _stream_tile(
    acc, residual, scale_ptr, bias_ptr, out_ptr, keep, PART: tl.constexpr, C: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One part of the new stream: stored, and as fp32 numbers of what was stored."""
    col = PART * WIDTH + tl.arange(0, WIDTH)
    y = acc.to(tl.float32)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + col)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + col).to(tl.float32)[None, :]
    y = (y + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    at = tl.arange(0, BLOCK_M)[:, None] * C + col[None, :]
    tl.store(out_ptr + at, y, mask=keep)
    return y.to(tl.float32)


@triton.jit
def _store_normed(
    y, rstd, inverse, normed_ptr, keep, STATIC: tl.constexpr, TOKEN: tl.constexpr,
    PART: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One part of the normalised rows, from ``y`` without its mean; as layer_norm rounds it."""
    col = PART * WIDTH + tl.arange(0, WIDTH)
    at = tl.arange(0, BLOCK_M)[:, None] * C + col[None, :]
    if STATIC:
        z = rows_to_8_bits(y, rstd[:, None] * inverse, normed_ptr.dtype.element_ty)
    elif TOKEN:
        z = round_to_8_bits(y * rstd[:, None] * inverse[:, None], normed_ptr.dtype.element_ty)
    else:
        z = (y * rstd[:, None]).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + at, z, mask=keep)


@triton.jit(do_not_specialize=["M"])
def _linear_add_norm_kernel(
    x_ptr, weight_ptr, x_desc, weight_desc, scale_ptr, bias_ptr, residual_ptr, out_ptr,
    normed_ptr, output_scale_ptr, row_scale_ptr, M, K, eps,
    C: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, EARLY: tl.constexpr, NUM_STAGES: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """One program per BLOCK_M rows; operands by descriptors where there are any, else by pointers.

    8 bits are written with the step at ``output_scale_ptr``, or with one step a row, which goes to
    ``row_scale_ptr``.
    """
    launch_dependents(PDL)
    WIDTH: tl.constexpr = C // PARTS
    first = tl.program_id(0) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    valid = first + row < M
    keep = valid[:, None]
    k = tl.arange(0, BLOCK_K)
    residual_ptr += first.to(tl.int64) * C
    out_ptr += first.to(tl.int64) * C
    normed_ptr += first.to(tl.int64) * C
    x_at = x_ptr + first.to(tl.int64) * K + row[:, None] * K + k[None, :]
    STATIC: tl.constexpr = output_scale_ptr is not None
    TOKEN: tl.constexpr = row_scale_ptr is not None
    sums: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    inverse = 1.0
    if STATIC:
        inverse = inverse_step(tl.load(output_scale_ptr))
    wait_for_previous(PDL)
    if EARLY:
        r0 = _residual_tile(residual_ptr, keep, 0, C, WIDTH, BLOCK_M)
        if PARTS > 1:
            r1 = _residual_tile(residual_ptr, keep, 1, C, WIDTH, BLOCK_M)
        if PARTS > 2:
            r2 = _residual_tile(residual_ptr, keep, 2, C, WIDTH, BLOCK_M)
        if PARTS > 3:
            r3 = _residual_tile(residual_ptr, keep, 3, C, WIDTH, BLOCK_M)
    first_ptr = bias_ptr if scale_ptr is None else None
    acc0 = _first_sums(first_ptr, 0, WIDTH, BLOCK_M, sums)
    if PARTS > 1:
        acc1 = _first_sums(first_ptr, 1, WIDTH, BLOCK_M, sums)
    if PARTS > 2:
        acc2 = _first_sums(first_ptr, 2, WIDTH, BLOCK_M, sums)
    if PARTS > 3:
        acc3 = _first_sums(first_ptr, 3, WIDTH, BLOCK_M, sums)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if x_desc is not None:
            x = x_desc.load([first, start])
        elif EVEN_K:
            x = tl.load(x_at + start, mask=keep, other=0.0)
        else:
            x = tl.load(x_at + start, mask=keep & (start + k < K)[None, :], other=0.0)
        w0 = _weight_tile(weight_ptr, weight_desc, start, K, 0, WIDTH, BLOCK_K, EVEN_K)
        acc0 = tl.dot(x, tl.trans(w0), acc0, out_dtype=sums)
        if PARTS > 1:
            w1 = _weight_tile(weight_ptr, weight_desc, start, K, 1, WIDTH, BLOCK_K, EVEN_K)
            acc1 = tl.dot(x, tl.trans(w1), acc1, out_dtype=sums)
        if PARTS > 2:
            w2 = _weight_tile(weight_ptr, weight_desc, start, K, 2, WIDTH, BLOCK_K, EVEN_K)
            acc2 = tl.dot(x, tl.trans(w2), acc2, out_dtype=sums)
        if PARTS > 3:
            w3 = _weight_tile(weight_ptr, weight_desc, start, K, 3, WIDTH, BLOCK_K, EVEN_K)
            acc3 = tl.dot(x, tl.trans(w3), acc3, out_dtype=sums)
    if not EARLY:
        r0 = _residual_tile(residual_ptr, keep, 0, C, WIDTH, BLOCK_M)
        if PARTS > 1:
            r1 = _residual_tile(residual_ptr, keep, 1, C, WIDTH, BLOCK_M)
        if PARTS > 2:
            r2 = _residual_tile(residual_ptr, keep, 2, C, WIDTH, BLOCK_M)
        if PARTS > 3:
            r3 = _residual_tile(residual_ptr, keep, 3, C, WIDTH, BLOCK_M)
    y0 = _stream_tile(acc0, r0, scale_ptr, bias_ptr, out_ptr, keep, 0, C, WIDTH, BLOCK_M)
    total = y0
    if PARTS > 1:
        y1 = _stream_tile(acc1, r1, scale_ptr, bias_ptr, out_ptr, keep, 1, C, WIDTH, BLOCK_M)
        total += y1
    if PARTS > 2:
        y2 = _stream_tile(acc2, r2, scale_ptr, bias_ptr, out_ptr, keep, 2, C, WIDTH, BLOCK_M)
        total += y2
    if PARTS > 3:
        y3 = _stream_tile(acc3, r3, scale_ptr, bias_ptr, out_ptr, keep, 3, C, WIDTH, BLOCK_M)
        total += y3
    mean = (tl.sum(total, 1) / C)[:, None]
    y0 -= mean
    square = y0 * y0
    if PARTS > 1:
        y1 -= mean
        square += y1 * y1
    if PARTS > 2:
        y2 -= mean
        square += y2 * y2
    if PARTS > 3:
        y3 -= mean
        square += y3 * y3
    rstd = 1.0 / tl.sqrt(tl.sum(square, 1) / C + eps)
    if TOKEN:
        bits = row_amax_bits(y0 * rstd[:, None])
        if PARTS > 1:
            bits = tl.maximum(bits, row_amax_bits(y1 * rstd[:, None]))
        if PARTS > 2:
            bits = tl.maximum(bits, row_amax_bits(y2 * rstd[:, None]))
        if PARTS > 3:
            bits = tl.maximum(bits, row_amax_bits(y3 * rstd[:, None]))
        step = token_step(bits.to(tl.float32, bitcast=True), LARGEST, SMALLEST)
        tl.store(row_scale_ptr + first + row, step, mask=valid)
        inverse = tl.div_rn(1.0, step)
    _store_normed(y0, rstd, inverse, normed_ptr, keep, STATIC, TOKEN, 0, C, WIDTH, BLOCK_M)
    if PARTS > 1:
        _store_normed(y1, rstd, inverse, normed_ptr, keep, STATIC, TOKEN, 1, C, WIDTH, BLOCK_M)
    if PARTS > 2:
        _store_normed(y2, rstd, inverse, normed_ptr, keep, STATIC, TOKEN, 2, C, WIDTH, BLOCK_M)
    if PARTS > 3:
        _store_normed(y3, rstd, inverse, normed_ptr, keep, STATIC, TOKEN, 3, C, WIDTH, BLOCK_M)


def linear_add_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    normed: torch.Tensor,
    output_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    config: LinearNormConfig | None = None,
    pdl: bool = False,
) -> None:
    """Launch on ``x [..., K]``, writing ``out``, ``normed`` and ``row_scale``; see the public
    function. All three are contiguous."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if out.numel() == 0:
        return
    x, weight, residual = x.contiguous(), weight.contiguous(), residual.contiguous()
    C, K = weight.shape
    M = x.numel() // K
    capability = device_capability(x.device)
    if config is None:
        config = default_linear_norm_config(M, C, K, x.element_size(), capability)
    assert config is not None  # linear_norm_blocker was asked before
    x_desc = weight_desc = None
    with on_device(x.device):
        if config.tma and not (x.data_ptr() | weight.data_ptr()) % TMA_ALIGNMENT:
            x_desc = TensorDescriptor.from_tensor(x.view(M, K), [config.block_m, config.block_k])
            weight_desc = TensorDescriptor.from_tensor(weight, [config.width, config.block_k])
        _linear_add_norm_kernel[(cdiv(M, config.block_m),)](
            x, weight, x_desc, weight_desc,
            None if scale is None else scale.contiguous(),
            None if bias is None else bias.contiguous(),
            residual, out, normed, output_scale, row_scale, M, K, eps,
            C=C, PARTS=C // config.width, BLOCK_M=config.block_m, BLOCK_K=config.block_k,
            EVEN_K=K % config.block_k == 0, EARLY=config.early, NUM_STAGES=config.num_stages,
            LARGEST=LARGEST.get(normed.dtype, 0.0), SMALLEST=SMALLEST_STEP,
            num_warps=config.num_warps, **pdl_options(pdl, capability),
        )  # fmt: skip

"""The operators' kernels behind the argument order that TensorRT launches plugins with.

TensorRT passes ``inputs..., 32-bit integers..., outputs...`` and nothing else, so each function
here takes that order and calls the kernel of the PyTorch operator, which Triton inlines: strides
follow from the shape, floats (scale, eps) are read from one-element tensors, and pointers that a
configuration does not use repeat one that exists.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin.ops.layer_norm.forward import _layer_norm_fwd_kernel
from fastswin.ops.window_attention.forward import _window_attention_fwd_kernel
from fastswin.ops.window_attention.online import _window_attention_fwd_online_kernel


@triton.jit
def fastswin_window_attention(
    qkv_ptr, bias_ptr, head_scale_ptr, qkv_bias_ptr, H, W, windows_per_col, windows_per_row,
    out_ptr,
    N: tl.constexpr, NP: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, COSINE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_STATS: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, BLOCK_Q: tl.constexpr, NUM_STAGES: tl.constexpr,
    K1: tl.constexpr, K2: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Window attention; V1 reads its scale from the first element of ``head_scale_ptr``.

    ``BLOCK_K`` 0: whole rows of keys in tiles ``K1 + K2``, ``HEADS`` heads a program. Otherwise
    tiles of ``BLOCK_K`` keys with a running maximum, and the other three are not read.
    """
    C: tl.constexpr = NH * D
    image = H.to(tl.int64) * W
    scale = tl.load(head_scale_ptr)
    if BLOCK_K == 0:
        _window_attention_fwd_kernel(
            q_ptr=qkv_ptr, k_ptr=qkv_ptr + C, v_ptr=qkv_ptr + 2 * C, out_ptr=out_ptr,
            stats_ptr=bias_ptr, bias_ptr=bias_ptr, mask_ptr=bias_ptr,
            head_scale_ptr=head_scale_ptr, pad_ptr=qkv_bias_ptr, seed_ptr=bias_ptr, scale=scale,
            drop_threshold=0, keep_factor=1.0, H=H, W=W, windows_per_col=windows_per_col,
            windows_per_row=windows_per_row, num_masks=1,
            q_stride_image=image * (3 * C), q_stride_row=3 * C, q_stride_head=D,
            k_stride_image=image * (3 * C), k_stride_row=3 * C, k_stride_head=D,
            v_stride_image=image * (3 * C), v_stride_row=3 * C, v_stride_head=D,
            out_stride_image=image * C, out_stride_row=C, out_stride_head=D,
            N=N, NP=NP, NH=NH, D=D, BLOCK_D=BLOCK_D, WH=WH, WW=WW, SH=SH, SW=SW,
            PARTITIONED=PARTITIONED, HAS_PAD=HAS_PAD, COSINE=COSINE, HAS_MASK=HAS_MASK,
            HAS_STATS=HAS_STATS, DROPOUT=DROPOUT, PRECISION=PRECISION, WIDE=WIDE,
            BLOCK_Q=BLOCK_Q, NUM_STAGES=NUM_STAGES, K1=K1, K2=K2, HEADS=HEADS,
        )  # fmt: skip
    else:
        _window_attention_fwd_online_kernel(
            q_ptr=qkv_ptr, k_ptr=qkv_ptr + C, v_ptr=qkv_ptr + 2 * C, out_ptr=out_ptr,
            stats_ptr=bias_ptr, bias_ptr=bias_ptr, mask_ptr=bias_ptr,
            head_scale_ptr=head_scale_ptr, pad_ptr=qkv_bias_ptr, seed_ptr=bias_ptr, scale=scale,
            drop_threshold=0, keep_factor=1.0, H=H, W=W, windows_per_col=windows_per_col,
            windows_per_row=windows_per_row, num_masks=1,
            q_stride_image=image * (3 * C), q_stride_row=3 * C, q_stride_head=D,
            k_stride_image=image * (3 * C), k_stride_row=3 * C, k_stride_head=D,
            v_stride_image=image * (3 * C), v_stride_row=3 * C, v_stride_head=D,
            out_stride_image=image * C, out_stride_row=C, out_stride_head=D,
            N=N, NP=NP, NH=NH, D=D, BLOCK_D=BLOCK_D, WH=WH, WW=WW, SH=SH, SW=SW,
            PARTITIONED=PARTITIONED, HAS_PAD=HAS_PAD, COSINE=COSINE, HAS_MASK=HAS_MASK,
            HAS_STATS=HAS_STATS, DROPOUT=DROPOUT, PRECISION=PRECISION, WIDE=WIDE,
            BLOCK_Q=BLOCK_Q, NUM_STAGES=NUM_STAGES, BLOCK_K=BLOCK_K,
        )  # fmt: skip


@triton.jit
def fastswin_layer_norm(
    x_ptr, weight_ptr, bias_ptr, eps_ptr, M, out_ptr,
    C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """LayerNorm with weight and bias; ``eps_ptr`` holds one fp32 element."""
    _layer_norm_fwd_kernel(
        x_ptr=x_ptr, weight_ptr=weight_ptr, bias_ptr=bias_ptr, offset_ptr=x_ptr,
        residual_ptr=x_ptr, out_ptr=out_ptr, M=M, eps=tl.load(eps_ptr), C=C, CA=CA, CB=CB,
        BLOCK_M=BLOCK_M, HAS_WEIGHT=True, HAS_BIAS=True, HAS_OFFSET=False, HAS_RESIDUAL=False,
    )  # fmt: skip

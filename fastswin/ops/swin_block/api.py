"""Public Swin block: validation and dispatch."""

from __future__ import annotations

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.device import device_capability
from fastswin.ops.swin_block.config import swin_block_blocker
from fastswin.ops.swin_block.launch import swin_block_fwd
from fastswin.ops.swin_block.packing import pack_block
from fastswin.ops.swin_block.reference import swin_block_ref
from fastswin.ops.window_attention.checks import (
    check_shapes,
    check_stream,
    check_windows,
    resolve_scale,
)
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale

Pair = tuple[int, int]


def swin_block(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair = (0, 0),
    bias: torch.Tensor | None = None,
    pad_qkv: torch.Tensor | None = None,
    scale: float | None = None,
    logit_scale: torch.Tensor | None = None,
    norm1_weight: torch.Tensor | None = None,
    norm1_bias: torch.Tensor | None = None,
    norm2_weight: torch.Tensor | None = None,
    norm2_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """A Swin block, attention and MLP with their norms and residuals, for inference.

    V1, without norms (their affines belong folded into qkv and fc1):
    ``x' = x + proj(attn(norm(x)))``, ``x' + fc2(gelu(fc1(norm(x'))))``. V2, with norms and
    ``logit_scale``: ``x' = x + norm1(proj(attn(x)))``, ``x' + norm2(fc2(gelu(fc1(x'))))``.

    One kernel in clusters on compute capability 9.0, made for few windows: two to six heads of 32
    channels, windows of 49 to 64 tokens that tile the map, an MLP of four times the channels.

    Args:
        x: ``[B, H, W, C]``, the residual stream in image order.
        qkv_weight, qkv_bias: ``[3C, C]`` in x's dtype and ``[3C]``.
        proj_weight, proj_bias: ``[C, C]`` and ``[C]``.
        fc1_weight, fc1_bias: ``[hidden, C]`` and ``[hidden]``.
        fc2_weight, fc2_bias: ``[C, hidden]`` and ``[C]``.
        num_heads, window_size, shift_size, scale, logit_scale: as ``ops.window_attention``.
        bias: dense relative position bias ``[nH, N, N]`` or None.
        pad_qkv: ``[3C]``, qkv of a padded token (the unfolded bias); None means zeros.
        norm1_weight, norm1_bias, norm2_weight, norm2_bias: ``[C]``, V2's; all or none.
        eps: LayerNorm epsilon.
        out: ``[B, H, W, C]`` where the result goes; may be ``x``.
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, H, W, C]`` in x's dtype.

    Raises:
        ValueError: a shape or combination does not fit; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    check_stream(x, num_heads)
    check_windows(window_size, shift_size)
    H, W, C = x.shape[1:]
    hidden, tokens = fc1_weight.shape[0], window_size[0] * window_size[1]
    norms = (norm1_weight, norm1_bias, norm2_weight, norm2_bias)
    expected = {
        "qkv_weight": (qkv_weight, (3 * C, C)),
        "qkv_bias": (qkv_bias, (3 * C,)),
        "proj_weight": (proj_weight, (C, C)),
        "proj_bias": (proj_bias, (C,)),
        "fc1_weight": (fc1_weight, (hidden, C)),
        "fc1_bias": (fc1_bias, (hidden,)),
        "fc2_weight": (fc2_weight, (C, hidden)),
        "fc2_bias": (fc2_bias, (C,)),
        "bias": (bias, (num_heads, tokens, tokens)),
        "pad_qkv": (pad_qkv, (3 * C,)),
        "norm1_weight": (norm1_weight, (C,)),
        "norm1_bias": (norm1_bias, (C,)),
        "norm2_weight": (norm2_weight, (C,)),
        "norm2_bias": (norm2_bias, (C,)),
        "out": (out, tuple(x.shape)),
    }
    if out is not None and (out.dtype, out.device) != (x.dtype, x.device):
        raise ValueError(f"out must be {x.dtype} on {x.device}, got {out.dtype} on {out.device}")
    check_shapes(expected)
    given = sum(norm is not None for norm in norms)
    if given not in (0, 4):
        raise ValueError("give norm1_weight, norm1_bias, norm2_weight and norm2_bias or none")
    scale = resolve_scale(scale, logit_scale, num_heads, C // num_heads)
    weights = (qkv_weight, proj_weight, fc1_weight, fc2_weight)
    other = next((w.dtype for w in weights if w.dtype != x.dtype), None)
    vectors = (qkv_bias, proj_bias, fc1_bias, fc2_bias, bias, logit_scale, *norms)
    chosen = choose_impl(
        impl,
        "swin_block",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_no_gradient(x, *weights, *vectors),
            why_no_clusters(x.device.type, device_capability(x.device)),
            swin_block_blocker(C, num_heads, hidden, window_size, (H, W)),
            None if other is None else f"weights are {other}, x is {x.dtype}",
            None
            if (given == 4) == (logit_scale is not None)
            else "norms behind (V2) need logit_scale, norms in front (V1) take none",
            None if out is None or out.is_contiguous() else "out is not contiguous",
        ],
    )
    layers = (
        (qkv_weight, qkv_bias), (proj_weight, proj_bias), (fc1_weight, fc1_bias),
        (fc2_weight, fc2_bias),
    )  # fmt: skip
    if chosen == "reference":
        y = swin_block_ref(
            x, *layers, bias, pad_qkv, (norm1_weight, norm1_bias), (norm2_weight, norm2_bias),
            num_heads, window_size, shift_size, scale, logit_scale, eps,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    affines = [
        None if w is None or b is None else (w.float(), b.float())
        for w, b in ((norm1_weight, norm1_bias), (norm2_weight, norm2_bias))
    ]
    x = x.contiguous()
    return swin_block_fwd(
        x, pack_block(*layers, *affines),
        pack_bias(bias, num_heads, window_size, shift_size, x.device), pack_head_scale(logit_scale),
        scale, window_size, shift_size, eps, torch.empty_like(x) if out is None else out,
    )  # fmt: skip

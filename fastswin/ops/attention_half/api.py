"""Public attention half of a block: validation and dispatch."""

from __future__ import annotations

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.device import device_capability
from fastswin.ops.attention_half.config import (
    AttentionHalfConfig,
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
)
from fastswin.ops.attention_half.packing import pack_projection
from fastswin.ops.attention_half.reference import attention_half_ref
from fastswin.ops.window_attention.checks import (
    check_shapes,
    check_stream,
    check_windows,
    resolve_scale,
)
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale

Pair = tuple[int, int]


def attention_half(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None = None,
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair = (0, 0),
    bias: torch.Tensor | None = None,
    pad_qkv: torch.Tensor | None = None,
    scale: float | None = None,
    logit_scale: torch.Tensor | None = None,
    norm_first: bool = True,
    eps: float = 1e-5,
    offset: torch.Tensor | None = None,
    proj_weight: torch.Tensor | None = None,
    proj_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: AttentionHalfConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """LayerNorm, qkv and shifted-window attention of a map in one kernel, for inference.

    With ``proj_weight`` the whole half: ``x + proj(attn(norm(x)))`` (V1) or, with ``norm_weight``,
    ``x + norm(proj(attn(x)))`` (V2).

    Args:
        x: ``[B, H, W, C]``, the residual stream in image order.
        qkv_weight, qkv_bias: ``[3C, C]`` in x's dtype and ``[3C]``; a LayerNorm's affine belongs
            folded into them.
        num_heads, window_size, shift_size, scale, logit_scale: as ``ops.window_attention``.
        bias: dense relative position bias ``[nH, N, N]`` or None.
        pad_qkv: ``[3C]``, qkv of a padded token (the unfolded bias); None means zeros.
        norm_first: whether each row is normalised (without affine) in front of qkv.
        eps: LayerNorm epsilon.
        offset: ``[C]`` added to every row of x first, and to the residual; needs ``norm_first``.
        proj_weight, proj_bias: ``[C, C]`` in x's dtype and ``[C]``.
        norm_weight, norm_bias: ``[C]``, V2's LayerNorm behind proj; both or neither.
        out: ``[B, H, W, C]`` where the result goes; with proj it may be ``x``.
        impl: "auto", "triton" or "reference".
        config: tiles; a ``WholeWindowConfig`` with proj, a ``HeadsConfig`` without.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes a
            weight.

    Returns:
        ``[B, H, W, C]`` in x's dtype.

    Raises:
        ValueError: a shape or combination does not fit; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    check_stream(x, num_heads)
    check_windows(window_size, shift_size)
    H, W, C = x.shape[1:]
    tokens = window_size[0] * window_size[1]
    expected = {
        "qkv_weight": (qkv_weight, (3 * C, C)),
        "qkv_bias": (qkv_bias, (3 * C,)),
        "pad_qkv": (pad_qkv, (3 * C,)),
        "bias": (bias, (num_heads, tokens, tokens)),
        "offset": (offset, (C,)),
        "proj_weight": (proj_weight, (C, C)),
        "proj_bias": (proj_bias, (C,)),
        "norm_weight": (norm_weight, (C,)),
        "norm_bias": (norm_bias, (C,)),
        "out": (out, tuple(x.shape)),
    }
    check_shapes(expected)
    _check_combination(x, norm_first, offset, proj_weight, proj_bias, norm_weight, norm_bias, out)
    scale = resolve_scale(scale, logit_scale, num_heads, C // num_heads)
    whole = proj_weight is not None
    tensors = (x, qkv_weight, qkv_bias, bias, logit_scale, offset, proj_weight, proj_bias)
    chosen = choose_impl(
        impl,
        "attention_half",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_no_gradient(*tensors, norm_weight, norm_bias),
            _why_not_device(x.device),
            attention_half_blocker(C, num_heads, tokens, whole, H * W * C, config),
            f"qkv_weight is {qkv_weight.dtype}, x is {x.dtype}"
            if qkv_weight.dtype != x.dtype
            else None,
        ],
    )
    if chosen == "reference":
        y = attention_half_ref(
            x, qkv_weight, qkv_bias, bias, pad_qkv, num_heads, window_size, shift_size, scale,
            logit_scale, eps, norm_first, offset, proj_weight, proj_bias, norm_weight, norm_bias,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    table = pack_bias(bias, num_heads, window_size, shift_size, x.device)
    head_scale = pack_head_scale(logit_scale)
    x, qkv_weight = x.contiguous(), qkv_weight.contiguous()
    pad_qkv = None if pad_qkv is None else pad_qkv.to(x.dtype)
    if proj_weight is None:
        from fastswin.ops.attention_half import heads

        assert not isinstance(config, WholeWindowConfig)  # attention_half_blocker was asked
        vectors = pack_projection(qkv_weight, qkv_bias, offset)
        return heads.heads_attention_fwd(
            x, qkv_weight, vectors, offset, table, head_scale, pad_qkv, scale, num_heads,
            window_size, shift_size, eps if norm_first else None, out, config, pdl,
        )  # fmt: skip
    from fastswin.ops.attention_half import whole as whole_window

    assert not isinstance(config, HeadsConfig)
    return whole_window.whole_window_fwd(
        x, qkv_weight, qkv_bias, offset, table, head_scale, pad_qkv, proj_weight.contiguous(),
        proj_bias, norm_weight, norm_bias, scale, num_heads, window_size, shift_size, eps,
        norm_first, out, config, pdl,
    )  # fmt: skip


def _check_combination(
    x: torch.Tensor,
    norm_first: bool,
    offset: torch.Tensor | None,
    proj_weight: torch.Tensor | None,
    proj_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    if offset is not None and not norm_first:
        raise ValueError("offset needs norm_first=True")
    if (norm_weight is None) != (norm_bias is None):
        raise ValueError("give norm_weight and norm_bias together or not at all")
    if norm_weight is not None and norm_first:
        raise ValueError("norm_weight (V2) needs norm_first=False")
    if proj_weight is None and (proj_bias is not None or norm_weight is not None):
        raise ValueError("proj_bias and norm_weight need proj_weight")
    if proj_weight is None and out is x:
        raise ValueError("out may be x only with proj_weight: other heads still read x")


def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda" or device_capability(device) >= (8, 0):
        return None
    return "the products need the tensor cores of compute capability 8.0"

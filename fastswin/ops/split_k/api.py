"""Public split-K product and its joining: validation and dispatch."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.device import multiprocessor_count
from fastswin.ops.quantize.checks import check_steps, resolve_output, why_not_format
from fastswin.ops.quantize.reference import LARGEST
from fastswin.ops.split_k.config import (
    MAX_SPLITS,
    SplitKConfig,
    config_blocker,
    default_split_k_config,
    split_k_blocker,
    why_no_split_k,
)
from fastswin.ops.split_k.reference import add_split_k_ref, split_k_linear_ref

Norm = Literal["none", "pre", "post"]

#: Widest row of the joining kernel.
MAX_CHANNELS = 8192


def split_k_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: SplitKConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` as the products of slices of K, not added yet: for few rows and long sums.

    Args:
        x: ``[..., K]``, half precision for Triton, or int8 or float8_e4m3fn with ``scale``.
        weight: ``[N, K]`` in x's dtype, as torch.nn.Linear stores it.
        scale: fp32 ``[N]``, input step times weight step of 8-bit operands.
        impl: "auto", "triton" or "reference".
        config: slices and tiles; None takes the heuristic.
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``weight``.

    Returns:
        ``[splits, ..., N]`` in fp32; their sum over the first axis is the product.

    Raises:
        ValueError: a shape does not fit, or K cannot be cut; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    N, K = weight.shape
    if x.ndim < 2 or x.shape[-1] != K:
        raise ValueError(f"x must be [..., {K}] like weight's rows, got {tuple(x.shape)}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} like x, got {weight.dtype}")
    narrow = x.dtype in LARGEST
    if narrow != (scale is not None):
        raise ValueError(f"scale must be given for 8-bit operands and only there: {x.dtype}")
    if scale is not None and (tuple(scale.shape) != (N,) or scale.dtype != torch.float32):
        raise ValueError(f"scale must be float32 [{N}], got {scale.dtype} {tuple(scale.shape)}")
    if blocker := split_k_blocker(K) if config is None else config_blocker(config, K):
        raise ValueError(f"weight: {blocker}" if config is None else f"config: {blocker}")
    chosen = choose_impl(
        impl,
        "split_k_linear",
        [
            why_not_triton(x.device, torch.float16 if narrow else x.dtype),
            why_no_gradient(x, weight),
            why_not_format(x.device, x.dtype) if narrow else why_not_half(x.dtype),
            why_no_split_k(x.device),
        ],
    )
    if config is None:
        rows = x.numel() // K if K else 0
        config = default_split_k_config(rows, N, K, multiprocessor_count(x.device))
    assert config is not None  # split_k_blocker was asked
    if chosen == "reference":
        return split_k_linear_ref(x, weight, config.splits, scale)
    from fastswin.ops.split_k.forward import split_k_linear_fwd

    return split_k_linear_fwd(x, weight, config, pdl, scale)


def add_split_k(
    partials: torch.Tensor,
    stream: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm = "none",
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: Impl = "auto",
    pdl: bool = False,
) -> torch.Tensor | None:
    """Add a split product onto the residual stream, in place, with the LayerNorm next to it.

    ========  ==============================================  ===================================
    ``norm``  stream becomes                                  returned
    ========  ==============================================  ===================================
    "none"    ``stream + sum(partials) + bias``               None
    "pre"     the same                                        ``layer_norm`` of it, without affine
    "post"    ``stream + layer_norm(sum(partials) + bias)``   None
    ========  ==============================================  ===================================

    Args:
        partials: ``[splits, ..., C]`` fp32, from :func:`split_k_linear`.
        stream: ``[..., C]`` contiguous; written.
        bias: ``[C]`` of the product, or None.
        norm: where a LayerNorm stands: of V1's next half block ("pre"), of V2's branch ("post").
        norm_weight, norm_bias: ``[C]`` of the "post" norm; None is ones and zeros.
        eps: added to the variance.
        output_scale: fp32 ``[1]`` with "pre": the norm is stored in 8 bits with this step.
        out_dtype: with ``output_scale``, ``torch.int8`` (None) or ``torch.float8_e4m3fn``.
        impl: "auto", "triton" or "reference".
        pdl: programmatic dependent launch (_triton/pdl.py), where no kernel in flight writes
            ``bias``, ``norm_weight``, ``norm_bias`` or ``output_scale``.

    Returns:
        With "pre" the normalised stream ``[..., C]``, rounded to its dtype or to 8 bits only after
        the norm of the unrounded sum; else None.

    Raises:
        ValueError: a shape or choice does not fit; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    C = stream.shape[-1]
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {', '.join(get_args(Norm))}, got {norm!r}")
    if partials.ndim < 2 or partials.shape[1:] != stream.shape:
        raise ValueError(
            f"partials must be [splits, *{tuple(stream.shape)}] like stream, got "
            f"{tuple(partials.shape)}"
        )
    if not 1 <= partials.shape[0] <= MAX_SPLITS:
        raise ValueError(f"partials must hold 1 to {MAX_SPLITS} slices, got {partials.shape[0]}")
    wide = torch.promote_types(stream.dtype, torch.float32)
    if partials.dtype != wide:
        raise ValueError(f"partials must be {wide}, got {partials.dtype}")
    if not stream.is_contiguous() or not partials.is_contiguous():
        raise ValueError("stream and partials must be contiguous")
    for name, vector in (("bias", bias), ("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if vector is not None and tuple(vector.shape) != (C,):
            raise ValueError(f"{name} must be [{C}], got {tuple(vector.shape)}")
    if norm != "post" and (norm_weight is not None or norm_bias is not None):
        raise ValueError(f'norm_weight and norm_bias need norm="post", got {norm!r}')
    stored = resolve_output(output_scale, out_dtype, stream.dtype)
    if output_scale is not None:
        check_steps(output_scale, "output_scale", stream, C, parts=(1,))
        if norm != "pre":
            raise ValueError(f'output_scale needs norm="pre", got {norm!r}')
    elif stored != stream.dtype:
        raise ValueError(f"out_dtype must be None or {stream.dtype} without output_scale")
    chosen = choose_impl(
        impl,
        "add_split_k",
        [
            why_not_triton(stream.device, stream.dtype),
            why_no_gradient(partials, stream, bias, norm_weight, norm_bias),
            f"{C} channels exceed {MAX_CHANNELS}" if C > MAX_CHANNELS else None,
            None if output_scale is None else why_not_format(stream.device, stored),
        ],
    )
    if chosen == "reference":
        return add_split_k_ref(
            partials, stream, bias, norm, norm_weight, norm_bias, eps, output_scale, stored
        )
    from fastswin.ops.split_k.forward import add_split_k_fwd

    return add_split_k_fwd(
        partials, stream, bias, norm, norm_weight, norm_bias, eps, pdl, output_scale, stored
    )

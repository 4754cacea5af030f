"""Public fused 8-bit MLP: validation, reference and dispatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin.ops.quantize.checks import check_format, check_steps, why_not_format
from fastswin.ops.quantize.reference import quantize_ref
from fastswin.ops.quantized_linear.ordering import order_rows, restore_rows
from fastswin.ops.quantized_linear.reference import quantized_linear_ref
from fastswin.ops.quantized_mlp.config import (
    QuantizedMlpConfig,
    config_blocker,
    quantized_mlp_blocker,
)


def quantized_mlp(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_scale: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_scale: torch.Tensor,
    fc2_bias: torch.Tensor,
    *,
    input_scale: torch.Tensor,
    hidden_scale: torch.Tensor,
    offset: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    ordered: bool = False,
    impl: Impl = "auto",
    config: QuantizedMlpConfig | None = None,
) -> torch.Tensor:
    """``x + fc2(gelu(fc1(norm(x))))`` with 8-bit products: V1's MLP half, its affine folded in.

    Args:
        x: ``[..., C]`` fp16 or bf16, contiguous rows.
        fc1_weight, fc2_weight: ``[hidden, C]`` and ``[C, hidden]``, int8 or float8_e4m3fn.
        fc1_scale, fc2_scale: fp32 ``[hidden]`` and ``[C]``: input step times weight step.
        fc1_bias, fc2_bias: fp32 ``[hidden]`` and ``[C]``.
        input_scale, hidden_scale: fp32 ``[1]``, steps of what fc1 and fc2 read.
        offset: ``[C]`` added to every row of x first; None adds nothing.
        eps: LayerNorm epsilon.
        out: ``[..., C]`` where the result goes; may be ``x``.
        ordered: whether ``fc1_weight``, ``fc1_scale`` and ``fc1_bias`` are in the kernel's order
            (``order_rows`` in quantized_linear/ordering.py), into which calls bring them otherwise.
        impl: "auto", "triton" or "reference".
        config: tiles of the kernel; None takes the heuristic.

    Returns:
        ``[..., C]`` in x's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.
        RuntimeError: ``impl="triton"`` cannot run here.
    """
    C, hidden = x.shape[-1], fc1_weight.shape[0]
    check_format(fc1_weight.dtype, "fc1_weight")
    if fc2_weight.dtype != fc1_weight.dtype:
        raise ValueError(f"fc2_weight must be {fc1_weight.dtype} like fc1_weight")
    shapes = {
        "fc1_weight": (fc1_weight, (hidden, C)), "fc2_weight": (fc2_weight, (C, hidden)),
        "fc1_scale": (fc1_scale, (hidden,)), "fc1_bias": (fc1_bias, (hidden,)),
        "fc2_scale": (fc2_scale, (C,)), "fc2_bias": (fc2_bias, (C,)),
        "offset": (offset, (C,)), "out": (out, tuple(x.shape)),
    }  # fmt: skip
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
    check_steps(input_scale, "input_scale", x, C, parts=(1,))
    check_steps(hidden_scale, "hidden_scale", x, hidden, parts=(1,))
    if out is not None and (out.dtype != x.dtype or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous {x.dtype}, got {out.dtype}")
    if config is not None and (blocker := config_blocker(config)):
        raise ValueError(f"config: {blocker}")
    chosen = choose_impl(
        impl,
        "quantized_mlp",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_not_format(x.device, fc1_weight.dtype),
            why_no_gradient(x, fc1_bias, fc2_bias, offset),
            quantized_mlp_blocker(C, hidden),
        ],
    )
    if ordered == (chosen == "reference"):
        change = restore_rows if ordered else order_rows
        fc1_weight, fc1_scale, fc1_bias = map(change, (fc1_weight, fc1_scale, fc1_bias))
    operands = (fc1_weight, fc1_scale, fc1_bias, fc2_weight, fc2_scale, fc2_bias)
    if chosen == "reference":
        y = _quantized_mlp_ref(x, *operands, input_scale, hidden_scale, offset, eps)
        return y if out is None else out.copy_(y)
    from fastswin.ops.quantized_mlp.forward import quantized_mlp_fwd

    return quantized_mlp_fwd(x, *operands, input_scale, hidden_scale, offset, eps, out, config)


def _quantized_mlp_ref(
    x: torch.Tensor,
    fc1_weight: torch.Tensor,
    fc1_scale: torch.Tensor,
    fc1_bias: torch.Tensor,
    fc2_weight: torch.Tensor,
    fc2_scale: torch.Tensor,
    fc2_bias: torch.Tensor,
    input_scale: torch.Tensor,
    hidden_scale: torch.Tensor,
    offset: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    stream = x.float() if offset is None else x.float() + offset.float()
    dtype = fc1_weight.dtype
    h = quantize_ref(F.layer_norm(stream, (x.shape[-1],), eps=eps), input_scale, dtype)
    h = quantized_linear_ref(
        h, fc1_weight, fc1_scale, fc1_bias, None, "gelu", None, hidden_scale, dtype
    )
    return quantized_linear_ref(
        h, fc2_weight, fc2_scale, fc2_bias, None, None, stream, None, x.dtype
    )

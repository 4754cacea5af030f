"""Public window attention: validation and dispatch, nothing else.

Two entries share one kernel: :func:`window_attention` reads the qkv projection in image order and
does shift, partition, padding and mask as index arithmetic; :func:`window_attention_partitioned`
takes windows that the caller has cut already.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from fastswin._triton.available import Impl, choose_impl, why_no_tensor_cores, why_not_triton
from fastswin.ops.window_attention import training
from fastswin.ops.window_attention.backward_config import takes_whole_windows
from fastswin.ops.window_attention.checks import check_windows
from fastswin.ops.window_attention.dropout import make_seed
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.reference import (
    window_attention_partitioned_ref,
    window_attention_ref,
)

Pair = tuple[int, int]
InputPrecision = Literal["ieee", "tf32", "tf32x3"]

#: head_dim range of the kernels; the reference takes any.
KERNEL_HEAD_DIMS = (1, 128)


def window_attention(
    qkv: torch.Tensor,
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair = (0, 0),
    bias: torch.Tensor | None = None,
    bias_table: torch.Tensor | None = None,
    scale: float | None = None,
    logit_scale: torch.Tensor | None = None,
    qkv_bias: torch.Tensor | None = None,
    sum_qkv_grad: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    input_precision: InputPrecision = "ieee",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Shifted-window attention from a qkv map to an output map, both in image order.

    Args:
        qkv: ``[B, H, W, 3C]``, queries, keys and values in that order, each ``[nH, D]``.
        num_heads: ``nH``; ``C = nH * D``.
        window_size: ``(Wh, Ww)`` in tokens, ``N = Wh * Ww``.
        shift_size: cyclic shift ``(Sh, Sw)``, ``0 <= S < W`` per axis. Tokens that the shift
            brings together from two ends of the map get an additive -100.
        bias: dense relative position bias ``[nH, N, N]``; excludes ``bias_table``.
        bias_table: ``[(2 Wh - 1) * (2 Ww - 1), nH]``, expanded by relative position.
        scale: V1's factor on ``q @ k.T``; None means ``D ** -0.5``.
        logit_scale: V2: nH elements; turns on cosine attention with the temperature
            ``exp(min(logit_scale, ln 100))``. Excludes ``scale``.
        qkv_bias: ``[3C]``, what a padded token's qkv is where the map is no multiple of the
            window; None means zeros.
        sum_qkv_grad: add the sum of qkv's gradient over all tokens to qkv_bias's gradient. For a
            projection that added ``qkv_bias.detach()``: the kernel has those sums at hand, a pass
            of its own over dqkv has not.
        dropout_p: probability of dropping an attention weight.
        dropout_seed: makes dropout replayable; None draws from torch's generator.
        input_precision: how fp32 products are made: "ieee"; "tf32" by tensor cores, which read
            19 bits of an operand, rounded to nearest; "tf32x3" as the sum of three of those, with
            fp32's error (gradients, and cards without such tensor cores, multiply in IEEE).
        impl: "auto", "triton" or "reference".

    Returns:
        ``[B, H, W, C]`` in qkv's dtype, contiguous. Softmax and sums are fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError: an argument is off; the message names it and the legal values.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.

    Source: Liu et al. 2021 (V1) and 2022 (V2).
    """
    _check_image_arguments(qkv, num_heads, window_size, shift_size, qkv_bias)
    head_dim = qkv.shape[3] // (3 * num_heads)
    tokens = window_size[0] * window_size[1]
    _check_shared_arguments(
        qkv, num_heads, tokens, bias, scale, logit_scale, dropout_p, input_precision
    )
    _check_bias_table(bias, bias_table, num_heads, window_size, qkv)
    scale = head_dim**-0.5 if scale is None else float(scale)
    chosen = choose_impl(impl, "window_attention", _blockers(qkv, head_dim, None))
    seed = make_seed(dropout_seed, qkv.device) if dropout_p > 0 else None
    if chosen == "reference":
        if bias_table is not None:
            bias = expand_bias_table(bias_table, window_size)
        return window_attention_ref(
            qkv, bias, num_heads, window_size, shift_size, scale, logit_scale, qkv_bias,
            dropout_p, seed, sum_qkv_grad,
        )  # fmt: skip
    bias = bias if bias_table is None else bias_table  # the kernels read either
    differentiated = _needs_gradient(qkv, bias, logit_scale, qkv_bias)
    out, _ = training.window_attention(
        qkv.contiguous(), bias, logit_scale, qkv_bias, seed, scale, num_heads, window_size,
        shift_size, input_precision == "tf32", dropout_p, sum_qkv_grad,
        differentiated and not takes_whole_windows(tokens, head_dim, qkv.element_size()),
        _splits(qkv, input_precision),
    )  # fmt: skip
    return out


def window_attention_partitioned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    logit_scale: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    input_precision: InputPrecision = "ieee",
    impl: Impl = "auto",
) -> torch.Tensor:
    """Window attention for callers who have windows already.

    Args:
        q: ``[B_, nH, N, D]`` with ``B_ = B * nW``, the window index fastest; any strides.
        k: as ``q``.
        v: as ``q``.
        bias: ``[nH, N, N]`` or None.
        mask: ``[nW, N, N]`` or None; window ``i`` uses ``mask[i % nW]``. Float is additive (a
            finite fill is an ordinary number); bool or uint8 non-zero hides the key exactly, and a
            query whose keys are all hidden gives zeros.
        scale, logit_scale, dropout_p, dropout_seed, input_precision, impl: as in
            :func:`window_attention`.

    Returns:
        ``[B_, nH, N, D]``, contiguous.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`window_attention`.
    """
    if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            "q, k and v must have one shape [B_, nH, N, D], got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    windows, heads, tokens, head_dim = q.shape
    _check_shared_arguments(q, heads, tokens, bias, scale, logit_scale, dropout_p, input_precision)
    _check_mask(mask, windows, tokens, q)
    _check_devices(q, k=k, v=v, bias=bias, mask=mask, logit_scale=logit_scale)
    scale = head_dim**-0.5 if scale is None else float(scale)
    blockers = _blockers(q, head_dim, mask)
    chosen = choose_impl(impl, "window_attention_partitioned", blockers)
    seed = make_seed(dropout_seed, q.device) if dropout_p > 0 else None
    if chosen == "reference":
        return window_attention_partitioned_ref(
            q, k, v, bias, mask, scale, logit_scale, dropout_p, seed
        )
    differentiated = _needs_gradient(q, k, v, bias, logit_scale)
    out, _ = training.window_attention_partitioned(
        q, k, v, bias, mask, logit_scale, seed, scale, input_precision == "tf32", dropout_p,
        differentiated and not takes_whole_windows(tokens, head_dim, q.element_size()),
        _splits(q, input_precision),
    )  # fmt: skip
    return out


def _blockers(x: torch.Tensor, head_dim: int, mask: torch.Tensor | None) -> list[str | None]:
    """Reasons against the Triton path for valid arguments."""
    low, high = KERNEL_HEAD_DIMS
    differentiated = mask is not None and _needs_gradient(mask)
    return [
        why_not_triton(x.device, x.dtype),
        "the kernel has no gradient of mask" if differentiated else None,
        None if low <= head_dim <= high else f"head_dim {head_dim} is not in [{low}, {high}]",
    ]


def _splits(x: torch.Tensor, input_precision: InputPrecision) -> bool:
    """Whether products are three of TF32."""
    blocked = why_no_tensor_cores(x.device, x.dtype, True)
    return input_precision == "tf32x3" and x.dtype == torch.float32 and blocked is None


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_bias_table(
    bias: torch.Tensor | None,
    bias_table: torch.Tensor | None,
    num_heads: int,
    window_size: Pair,
    qkv: torch.Tensor,
) -> None:
    if bias_table is None:
        _check_devices(qkv, bias=bias)
        return
    if bias is not None:
        raise ValueError("give bias or bias_table, not both")
    rows = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
    if tuple(bias_table.shape) != (rows, num_heads):
        raise ValueError(
            f"bias_table must be [{rows}, {num_heads}] for window_size {tuple(window_size)} and "
            f"{num_heads} heads, got {tuple(bias_table.shape)}"
        )
    _check_devices(qkv, bias_table=bias_table)


def _check_devices(x: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but the input is on {x.device}")


def _check_image_arguments(
    qkv: torch.Tensor,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    qkv_bias: torch.Tensor | None,
) -> None:
    if qkv.ndim != 4:
        raise ValueError(f"qkv must be [B, H, W, 3C], got shape {tuple(qkv.shape)}")
    if num_heads < 1 or qkv.shape[3] % (3 * num_heads) or qkv.shape[3] == 0:
        raise ValueError(
            f"num_heads={num_heads}: qkv's last axis ({qkv.shape[3]}) must be a positive multiple "
            "of 3 * num_heads"
        )
    check_windows(window_size, shift_size)
    if min(qkv.shape[1:3]) < 1:
        raise ValueError(f"qkv's map must not be empty, got shape {tuple(qkv.shape)}")
    if qkv_bias is not None and tuple(qkv_bias.shape) != (qkv.shape[3],):
        raise ValueError(
            f"qkv_bias must be [{qkv.shape[3]}] like qkv's last axis, got {tuple(qkv_bias.shape)}"
        )
    _check_devices(qkv, qkv_bias=qkv_bias)


def _check_shared_arguments(
    x: torch.Tensor,
    num_heads: int,
    tokens: int,
    bias: torch.Tensor | None,
    scale: float | None,
    logit_scale: torch.Tensor | None,
    dropout_p: float,
    input_precision: str,
) -> None:
    if not x.dtype.is_floating_point:
        raise TypeError(f"qkv must be a float tensor, got {x.dtype}")
    if bias is not None and tuple(bias.shape) != (num_heads, tokens, tokens):
        raise ValueError(
            f"bias must be [{num_heads}, {tokens}, {tokens}] (heads, queries, keys), "
            f"got {tuple(bias.shape)}"
        )
    if logit_scale is not None:
        if scale is not None:
            raise ValueError("give scale (V1) or logit_scale (V2), not both")
        if logit_scale.numel() != num_heads:
            raise ValueError(
                f"logit_scale must hold one number per head ({num_heads}), "
                f"got shape {tuple(logit_scale.shape)}"
            )
        _check_devices(x, logit_scale=logit_scale)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")
    if input_precision not in get_args(InputPrecision):
        raise ValueError(
            f"input_precision must be one of {get_args(InputPrecision)}, got {input_precision!r}"
        )


def _check_mask(mask: torch.Tensor | None, windows: int, tokens: int, q: torch.Tensor) -> None:
    if mask is None:
        return
    if mask.ndim != 3 or tuple(mask.shape[1:]) != (tokens, tokens) or mask.shape[0] == 0:
        raise ValueError(f"mask must be [nW, {tokens}, {tokens}], got {tuple(mask.shape)}")
    if windows % mask.shape[0]:
        raise ValueError(
            f"mask has nW={mask.shape[0]} windows, which does not divide q's {windows} windows"
        )
    if mask.dtype not in (torch.bool, torch.uint8) and not mask.dtype.is_floating_point:
        raise TypeError(f"mask must be bool, uint8 (non-zero hides) or float, got {mask.dtype}")
    if mask.dtype.is_floating_point and mask.numel():
        _refuse_zero_one(mask)


def _refuse_zero_one(mask: torch.Tensor) -> None:
    """A float mask of only 0 and 1 is almost surely a bool mask of the wrong type."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # reading values back would break the capture
    ones = mask == 1
    if bool(ones.any()) and bool((ones | (mask == 0)).all()):
        raise ValueError(
            "mask is a float mask that holds only 0 and 1; float masks are added to the scores. "
            "Pass mask.bool() to hide keys where it is 1"
        )

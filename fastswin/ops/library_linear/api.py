"""Public matrix product of the CUDA library: validation and dispatch."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from fastswin._triton.available import capability, why_no_gradient
from fastswin.ops.library_linear.library import library_blocker, library_version
from fastswin.ops.library_linear.problem import FP8, HALF, format_blocker, short
from fastswin.ops.library_linear.reference import library_linear_ref

LibraryImpl = Literal["auto", "library", "reference"]


def library_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    activation: Literal["gelu"] | None = None,
    residual: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    output_inverse: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    impl: LibraryImpl = "auto",
    config: int | None = None,
) -> torch.Tensor:
    """``activation(scale * x @ weight.T + bias + residual) / output_scale`` by one library kernel.

    Products are summed in fp32 and rounded once. In fp16 and bf16 bias and residual come in the
    same kernel, which PyTorch's ``addmm`` has no room for; in fp8 (e4m3) also GELU and an fp8
    output, which ``torch._scaled_mm`` does not reach.

    Args:
        x: ``[..., K]`` fp16, bf16 or float8_e4m3fn, contiguous.
        weight: ``[N, K]`` in x's dtype, contiguous, as torch.nn.Linear stores it.
        bias: ``[N]`` in the output's dtype (fp16 or bf16 where that is fp8), or None.
        scale: fp32 ``[1]``, the product of x's and weight's steps; fp8 only and needed there.
            ``[N]``, a step per output channel, together with ``row_scale``.
        row_scale: fp32 ``[M]``, a step per row of x (M: x's leading sizes multiplied), or None.
            Not with an fp8 output. Measured 1.2 times as slow as one ``scale`` on an H100.
        activation: None or "gelu", the tanh form. It is up to 4.7e-4 off the erf form, which an fp8
            output hides and a wider one does not, so it needs ``out_dtype`` float8_e4m3fn.
        residual: ``[..., N]`` in the output's dtype, added before rounding, or None; may be
            ``out``. Excludes ``activation`` and an fp8 output.
        output_scale: fp32 ``[1]``, the step of an fp8 output. Costs a second, tiny launch: prefer
            ``output_inverse``.
        output_inverse: fp32 ``[1]``, 1 / output_scale, computed once by the caller; excludes it.
        out: ``[..., N]``, contiguous, where the result goes; may be ``residual``.
        out_dtype: None is that of ``out``, else of ``residual``, else of x (fp8: must be told).
        impl: "auto", "library" or "reference" (plain PyTorch).
        config: index into the library's list of at most 8 algorithms for this problem, the one it
            expects to be fastest first; None is 0.

    Returns:
        ``[..., N]``, saturated at +-448 in fp8.

    Raises:
        ValueError: a shape, dtype or choice does not fit; the message names the argument.
        RuntimeError: ``impl="library"`` cannot run here; the message says why.
        LibraryLinearError: the library has no kernel for this combination, with its status.

    Source: cuBLAS manual, ``cublasLtMatmul``; the combinations in docs/library_linear.md.
    """
    out_dtype = _out_dtype(x, residual, out, out_dtype)
    _check_operands(x, weight, bias, out_dtype)
    shape = (*x.shape[:-1], weight.shape[0])
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and (tuple(like.shape) != shape or like.dtype != out_dtype):
            raise ValueError(
                f"{name} must be {short(out_dtype)} {shape}, got {short(like.dtype)} "
                f"{tuple(like.shape)}"
            )
    _check_scales(x, weight, scale, row_scale, output_scale, output_inverse, out_dtype)
    if activation not in (None, "gelu"):
        raise ValueError(f"activation must be None or 'gelu', got {activation!r}")
    if activation is not None and out_dtype != FP8:
        raise ValueError(
            "activation='gelu' is the tanh form and needs out_dtype float8_e4m3fn, got "
            f"{short(out_dtype)}"
        )
    if residual is not None and out_dtype == FP8:
        raise ValueError("residual needs out_dtype float16 or bfloat16, got float8_e4m3fn")
    if config is not None and (not isinstance(config, int) or config < 0):
        raise ValueError(f"config must be None or an index of at least 0, got {config!r}")
    given = [bias, scale, row_scale, residual, output_scale, output_inverse, out]
    if not _use_library(impl, x, weight, given, out_dtype, by_channel=row_scale is not None):
        return library_linear_ref(
            x, weight, bias, scale, row_scale, activation, residual, output_scale,
            output_inverse, out_dtype, out,
        )  # fmt: skip
    from fastswin.ops.library_linear.launch import library_linear_fwd

    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    if output_scale is not None:
        output_inverse = output_scale.reciprocal()
    return library_linear_fwd(
        x, weight, bias, scale, row_scale, activation == "gelu", residual, output_inverse, out,
        config or 0,
    )  # fmt: skip


def library_linear_blocker(
    device: torch.device,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    *,
    N: int | None = None,
    K: int | None = None,
    by_channel: bool = False,
) -> str | None:
    """Why the library cannot take such a product, known before any tensor exists; None if it can.

    Args:
        device: where.
        dtype: of x and weight.
        out_dtype: of the output; None is x's, or fp16 for fp8.
        N, K: output and input channels; None is any that fit.
        by_channel: whether ``row_scale`` is given.
    """
    if out_dtype is None:
        out_dtype = torch.float16 if dtype == FP8 else dtype
    if reason := format_blocker(dtype, out_dtype, N, K):
        return reason
    if device.type != "cuda":  # before the library is looked for and mapped
        return f"device {device} is not a CUDA device"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    if reason := library_blocker():
        return reason
    found = capability(torch.cuda.current_device() if device.index is None else device.index)
    needed = {FP8: (8, 9), torch.bfloat16: (8, 0)}.get(dtype, (7, 0))
    if found < needed:
        return f"{short(dtype)} needs compute capability {needed}, this GPU has {found}"
    if by_channel and (library_version() < (12, 9, 0) or found[0] not in (9, 10)):
        return (
            "row_scale needs cuBLAS 12.9 and compute capability 9 or 10, this is "
            f"{'.'.join(map(str, library_version()))} on {found}"
        )
    return None


def _use_library(
    impl: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    given: list[torch.Tensor | None],
    out_dtype: torch.dtype,
    *,
    by_channel: bool,
) -> bool:
    """Resolve ``impl``: "auto" falls back to the reference, an explicit "library" raises."""
    if impl not in get_args(LibraryImpl):
        raise ValueError(f"impl must be one of {get_args(LibraryImpl)}, got {impl!r}")
    if impl == "reference":
        return False
    tensors = [x, weight, *(t for t in given if t is not None)]
    N, K = weight.shape
    reason = library_linear_blocker(
        x.device, x.dtype, out_dtype, N=N, K=K, by_channel=by_channel
    ) or why_no_gradient(*tensors)
    if reason is None and any(t.device != x.device for t in tensors):
        reason = "the tensors are on different devices"
    if reason is None and not all(t.is_contiguous() for t in tensors):
        reason = "a tensor is not contiguous"
    if reason is None:
        return True
    if impl == "library":
        raise RuntimeError(f"library_linear: impl='library' cannot run here: {reason}")
    return False


def _out_dtype(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.dtype:
    for told in (out_dtype, out, residual):
        if told is not None:
            return told.dtype if isinstance(told, torch.Tensor) else told
    if x.dtype == FP8:
        raise ValueError("out_dtype must be given for float8_e4m3fn operands")
    return x.dtype


def _check_operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> None:
    if weight.dim() != 2:
        raise ValueError(f"weight must be [N, K], got {tuple(weight.shape)}")
    N, K = weight.shape
    if x.dim() < 1 or x.shape[-1] != K:
        raise ValueError(f"x must end in weight's {K} input channels, got {tuple(x.shape)}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must be {short(x.dtype)} as x is, got {short(weight.dtype)}")
    if bias is None:
        return
    if tuple(bias.shape) != (N,):
        raise ValueError(f"bias must be [{N}], got {tuple(bias.shape)}")
    allowed = HALF if out_dtype == FP8 else (out_dtype,)
    if bias.dtype not in allowed:
        raise ValueError(
            f"bias must be {' or '.join(map(short, allowed))} with out_dtype {short(out_dtype)}, "
            f"got {short(bias.dtype)}"
        )


def _check_scales(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    output_inverse: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if (scale is None) == (x.dtype == FP8):
        raise ValueError(
            f"scale must be given with float8_e4m3fn operands and only there, x is {short(x.dtype)}"
        )
    if (output_scale is not None) + (output_inverse is not None) != (out_dtype == FP8):
        raise ValueError(
            "one of output_scale and output_inverse must be given with out_dtype float8_e4m3fn "
            f"and neither otherwise, out_dtype is {short(out_dtype)}"
        )
    if row_scale is not None and out_dtype == FP8:
        raise ValueError("row_scale needs out_dtype float16 or bfloat16, got float8_e4m3fn")
    rows = math.prod(x.shape[:-1])
    sizes = {
        "scale": (scale, 1 if row_scale is None else weight.shape[0]),
        "row_scale": (row_scale, rows),
        "output_scale": (output_scale, 1),
        "output_inverse": (output_inverse, 1),
    }
    for name, (factor, size) in sizes.items():
        if factor is None:
            continue
        if factor.dtype != torch.float32 or factor.numel() != size:
            raise ValueError(
                f"{name} must be float32 with {size} elements, got {short(factor.dtype)} "
                f"{tuple(factor.shape)}"
            )

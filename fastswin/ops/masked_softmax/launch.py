"""From tensors to kernel arguments, for both directions; no Triton here, so it is unit-tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from fastswin._triton.device import multiprocessor_count
from fastswin.ops.masked_softmax.config import Form, SoftmaxConfig
from fastswin.ops.masked_softmax.layout import Operand, backward_layout, forward_layout
from fastswin.ops.masked_softmax.rows import RowPlan

MASK_KIND = {torch.bool: 1, torch.uint8: 1}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One launch: the kernel's positional arguments, its constants and its grid."""

    device: torch.device
    plan: RowPlan
    arguments: tuple[object, ...]
    constants: dict[str, object]
    programs: int
    num_warps: int
    form: Form
    partial: torch.Tensor


def describe(t: torch.Tensor) -> Operand:
    """Shape, strides, element size and whether the first element is on a 16-byte boundary."""
    return Operand(tuple(t.shape), t.stride(), t.element_size(), t.data_ptr() % 16 == 0)


def _row_aligned(t: torch.Tensor) -> torch.Tensor:
    """``t`` with keys one element apart (or broadcast); a copy where they are not."""
    return t if t.shape[-1] == 1 or t.stride(-1) in (0, 1) else t.contiguous()


def forward_problem(
    x: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    config: SoftmaxConfig | None,
) -> Problem:
    """Everything that the forward launch needs; ``out`` is contiguous or ``x`` itself.

    Raises:
        RuntimeError: the rows cannot be folded (:func:`why_not_planned` tells beforehand).
    """
    source = x if out is x else _row_aligned(x)
    kind = 0 if mask is None else MASK_KIND.get(mask.dtype, 2)
    rest = (
        describe(out),
        None if bias is None else describe(bias),
        None if mask is None else describe(mask),
        kind, causal, seq_lens is not None, config, multiprocessor_count(x.device),
    )  # fmt: skip
    layout = forward_layout(describe(source), *rest)
    if layout is None and out is not x:
        source = x.contiguous()
        layout = forward_layout(describe(source), *rest)
    if layout is None:
        raise RuntimeError(f"more than three row axes remain in x's shape {tuple(x.shape)}")
    arguments = (
        source, out,
        source if bias is None else bias,
        source if mask is None else _bytes(mask),
        *_lengths(layout.form, source, seq_lens),
        scale, *layout.numbers,
    )  # fmt: skip
    return Problem(
        x.device, layout.plan, arguments, layout.constants, layout.programs, layout.num_warps,
        layout.form, source,
    )  # fmt: skip


def backward_problem(
    grad: torch.Tensor,
    y: torch.Tensor,
    dx: torch.Tensor | None,
    summed: Mapping[str, torch.Tensor],
    seq_lens: torch.Tensor | None,
    scale: float,
    causal: bool,
    config: SoftmaxConfig | None,
) -> Problem:
    """Everything that the backward launch needs; ``summed`` names the wanted sums of ds.

    Raises:
        RuntimeError: the rows cannot be folded (:func:`why_not_planned` tells beforehand).
    """
    grad, y = _row_aligned(grad), _row_aligned(y)
    rest = (
        dx is not None, tuple((name, tuple(t.shape)) for name, t in summed.items()), causal,
        seq_lens is not None, config, multiprocessor_count(y.device),
    )  # fmt: skip
    layout = backward_layout(describe(grad), describe(y), *rest)
    if layout is None:
        grad, y = grad.contiguous(), y.contiguous()
        layout = backward_layout(describe(grad), describe(y), *rest)
    if layout is None:
        raise RuntimeError(f"more than three row axes remain in y's shape {tuple(y.shape)}")
    partial = y
    if summed:
        sizes = (layout.runs, *layout.plan.sizes, y.shape[-1])
        partial = torch.empty(sizes, dtype=torch.float32, device=y.device)
    arguments = (
        y, grad, y if dx is None else dx, partial, *_lengths(layout.form, y, seq_lens), scale,
        *layout.numbers,
    )  # fmt: skip
    return Problem(
        y.device, layout.plan, arguments, layout.constants, layout.programs, layout.num_warps,
        layout.form, partial,
    )  # fmt: skip


def _lengths(
    form: Form, stand_in: torch.Tensor, seq_lens: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The lengths argument; the paired kernels have none."""
    if form == "paired":
        return ()
    return (stand_in if seq_lens is None else seq_lens,)


def _bytes(mask: torch.Tensor) -> torch.Tensor:
    """A bool mask as bytes, the same memory."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask

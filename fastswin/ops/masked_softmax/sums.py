"""Second stage of dbias and the gradient of a float mask: partial sums of ds, added up in order.

    partial [runs, D0, D1, D2, N] fp32: ds summed over one program's run of the loop axis
    out     the operand's shape and dtype: partial summed over the axes that it does not move along

Neighbouring axes that are both summed, or both kept, merge, so every case is

    out[k, n] = sum over o, i of partial[o, k, i, n]

One kernel reads the partial sums once and writes the gradient in its own dtype. The order of the
additions depends on the shape only: three runs give the same bits, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastswin._triton.device import on_device
from fastswin._triton.launch import on_grid
from fastswin.ops.masked_softmax.config import next_power_of_2
from fastswin.ops.masked_softmax.rows import RowPlan

#: Terms added side by side, and partial sums that a program holds: 16 per thread, so that a few
#: hundred programs have enough loads under way to hide the latency of the L2 cache.
MAX_TERMS = 128
TILE_ELEMENTS = 4096
SUM_WARPS = 8

#: Columns of a program at most; more would leave multiprocessors idle.
MAX_COLUMNS = 512


@triton.jit(do_not_specialize=["outer", "column_blocks"])  # inner is 1 mostly: no division
def _softmax_sums_kernel(
    partial_ptr, out_ptr, outer, kept, inner, columns, column_blocks,
    TERMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per kept index and block of columns; TERMS partial sums at a time."""
    pid = tl.program_id(0)
    k = pid // column_blocks
    column = pid % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = (column < columns)[None, :]
    term = tl.arange(0, TERMS)
    sums = tl.zeros([TERMS, COLUMNS], tl.float32)
    for first in range(0, outer * inner, TERMS):
        at = first + term
        row = ((at // inner).to(tl.int64) * kept + k) * inner + at % inner
        keep = (at < outer * inner)[:, None] & column_ok
        sums += tl.load(
            partial_ptr + row[:, None] * columns + column[None, :], mask=keep, other=0.0
        )
    total = tl.sum(sums, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + k.to(tl.int64) * columns + column, total, mask=column < columns)


def reduce_partial(
    partial: torch.Tensor, plan: RowPlan, name: str, like: torch.Tensor
) -> torch.Tensor:
    """Add the tiles ``partial [runs, D0, D1, D2, N]`` to the shape and dtype of operand ``name``.

    Args:
        partial: fp32 sums, contiguous.
        plan: rows of the launch; an axis with stride 0 for the operand is summed.
        name: the operand's name in the plan.
        like: the operand.

    Returns:
        Gradient of ``like``'s shape and dtype, contiguous.
    """
    outer, kept, inner, columns = _four_axes(partial.shape, plan.strides[name][1:])
    whole = like.shape[-1:] == partial.shape[-1:]
    out = torch.empty(
        kept * columns, dtype=like.dtype if whole else partial.dtype, device=partial.device
    )
    terms = min(MAX_TERMS, next_power_of_2(outer * inner))
    block = min(MAX_COLUMNS, TILE_ELEMENTS // terms)
    column_blocks = -(-columns // block)
    with on_device(partial.device):
        on_grid(_softmax_sums_kernel, (kept * column_blocks,))(
            partial, out, outer, kept, inner, columns, column_blocks,
            TERMS=terms, COLUMNS=block, num_warps=SUM_WARPS,
        )  # fmt: skip
    if not whole:  # an operand that is constant along the keys
        out = out.view(-1, partial.shape[-1]).sum(-1).to(like.dtype)
    return out.view(like.shape)


def _four_axes(shape: torch.Size, moves: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Sizes (summed, kept, summed, kept) of ``[runs, D0, D1, D2, N]``, neighbours merged.

    Runs are always summed here and keys always kept, so the three axes between them leave room for
    one more kept and one more summed block, or for neither.
    """
    axes = [(shape[0], False)]
    axes += [(n, move != 0) for n, move in zip(shape[1:4], moves, strict=True) if n > 1]
    axes.append((shape[4], True))
    merged: list[tuple[int, bool]] = []
    for size, is_kept in axes:
        if merged and merged[-1][1] == is_kept:
            size *= merged.pop()[0]
        merged.append((size, is_kept))
    sizes = [size for size, _ in merged]
    if len(sizes) == 2:
        return sizes[0], 1, 1, sizes[1]
    outer, kept, inner, columns = sizes
    return outer, kept, inner, columns

"""Runs of windows of one kind: what a program that walks over windows keeps from one to the next.

All windows of one kind (geometry.py) share the packed bias of a head, and their tokens lie at the
same rows relative to the window's first row, also where the shift wraps around the map. So a
program that stays with one kind and head holds the bias and the addresses, and a step to the next
window adds to three numbers. On a padded map rows are made again for every window.

    windows of a map [nWh, nWw]   kind 0: (nWh - 1) * (nWw - 1)   1 (last column): nWh - 1
                                  2 (last row): nWw - 1           3: 1
    without a shift               kind 0: nWh * nWw

Each kind's windows (image, row, column; column fastest) are dealt to ``n`` runs of at most
``steps`` windows, in pieces or, interleaved, ``r, r + n, r + 2 n, ...``.
"""

from __future__ import annotations

import dataclasses
import functools

import triton
import triton.language as tl

from fastswin._triton.tiles import cdiv
from fastswin.ops.window_attention.launch import AttentionShape
from fastswin.ops.window_attention.tile import load_rows, token_rows

#: 1: neighbouring windows go to neighbouring programs; 0, as measured: a run has neighbours.
INTERLEAVED = 0


#: Parameters of the kernels that say how windows are dealt out; no code depends on their values.
RUN_ARGUMENTS = (
    "images", "steps", "interleaved", "first_1", "first_2", "first_3", "runs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Runs:
    """How windows are dealt out.

    Attributes:
        images: maps (windows when partitioned).
        steps: windows of a run at most.
        first: index of the first run of kinds 1, 2 and 3.
        total: runs.
    """

    images: int
    steps: int
    first: tuple[int, int, int]
    total: int

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels take."""
        return self.images, self.steps, INTERLEAVED, *self.first, self.total


def plan_runs(shape: AttentionShape, programs: int) -> Runs:
    """At most ``programs // heads`` runs, as even as the kinds allow; more where kinds are more."""
    rows, cols = shape.grid_size
    images = shape.windows // (rows * cols)
    shifted = sum(shape.shift_size) > 0
    return _plan(images, rows, cols, shifted, max(1, programs // shape.heads))


@functools.lru_cache(maxsize=256)
def _plan(images: int, rows: int, cols: int, shifted: bool, wanted: int) -> Runs:
    counts = [images * rows * cols, 0, 0, 0]
    if shifted:
        counts = [
            images * (rows - 1) * (cols - 1), images * (rows - 1), images * (cols - 1), images
        ]  # fmt: skip
    wanted = max(wanted, sum(count > 0 for count in counts))
    low, high = 1, max(counts)
    while low < high:
        middle = (low + high) // 2
        if sum(cdiv(count, middle) for count in counts) <= wanted:
            high = middle
        else:
            low = middle + 1
    cut = [cdiv(count, low) for count in counts]
    first = cut[0], cut[0] + cut[1], cut[0] + cut[1] + cut[2]
    return Runs(images, low, first, sum(cut))


@triton.jit
def locate_run(
    run, images, steps, interleaved, first_1, first_2, first_3, runs,
    windows_per_col, windows_per_row, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Kind of a run's windows, its first window, how many it has, and the way from one to the next.

    A window is (image (64-bit), row, column), counted among those of its kind, of which a map has
    ``rows`` times ``cols``; so is the way (:func:`next_window`).
    """
    kind = 0
    rows = windows_per_col
    cols = windows_per_row
    first = 0
    last = runs
    if SHIFTED:
        kind = (run >= first_1).to(tl.int32) + (run >= first_2).to(tl.int32)
        kind += (run >= first_3).to(tl.int32)
        first = tl.where(kind == 0, 0, tl.where(kind == 1, first_1, first_2))
        first = tl.where(kind == 3, first_3, first)
        last = tl.where(kind == 0, first_1, tl.where(kind == 1, first_2, first_3))
        last = tl.where(kind == 3, runs, last)
        rows = tl.where(kind >= 2, 1, windows_per_col - 1)
        cols = tl.where(kind % 2 == 1, 1, windows_per_row - 1)
    cols = tl.maximum(cols, 1)
    per_image = tl.maximum(rows * cols, 1)
    step = tl.where(interleaved > 0, last - first, 1)
    index = (run - first) * tl.where(interleaved > 0, 1, steps)
    count = tl.minimum(steps, (images * per_image - index + step - 1) // step)
    image = (index // per_image).to(tl.int64)
    row = index % per_image // cols
    col = index % cols
    return (
        kind, image, row, col, rows, cols, count,
        step // per_image, step % per_image // cols, step % cols,
    )  # fmt: skip


@triton.jit
def next_window(image, row, col, rows, cols, step_image, step_row, step_col):
    """The window of the same run that follows."""
    col += step_col
    over = col >= cols
    col = tl.where(over, col - cols, col)
    row += step_row + over.to(tl.int32)
    over = row >= rows
    row = tl.where(over, row - rows, row)
    return image + step_image + over.to(tl.int32), row, col


@triton.jit
def window_in_map(row, col, kind, windows_per_col, windows_per_row, SHIFTED: tl.constexpr):
    """Row and column in its map of a window that is counted within its kind."""
    if SHIFTED:
        row = tl.where(kind >= 2, windows_per_col - 1, row)
        col = tl.where(kind % 2 == 1, windows_per_row - 1, col)
    return row, col


@triton.jit
def relative_rows(
    window_row, window_col, token, H, W,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr,
):  # fmt: skip
    """Rows of the tokens of an unpadded window, from :func:`first_row`; the same for its kind."""
    row = token_rows(window_row, window_col, token, H, W, WH, WW, SH, SW, PARTITIONED, False, False)
    return row - first_row(window_row, window_col, W, WH, WW, PARTITIONED)


@triton.jit
def first_row(
    window_row, window_col, W, WH: tl.constexpr, WW: tl.constexpr, PARTITIONED: tl.constexpr
):
    """Row in its image at which a window begins, before the shift."""
    row = window_row * 0
    if not PARTITIONED:
        row = window_row * (WH * W) + window_col * WW
    return row


@triton.jit
def locate_tokens(
    image, row, col, kind, place, token, H, W, windows_per_col, windows_per_row,
    WH: tl.constexpr, WW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One window's number in the batch and first row (64-bit), its tokens' rows from there on.

    ``place`` holds the rows of the run; they are made again, from the image's first row, where
    there is padding. Also says which tokens are real.
    """
    window_row, window_col = window_in_map(
        row, col, kind, windows_per_col, windows_per_row, SH + SW > 0
    )
    window = (image * windows_per_col + window_row) * windows_per_row + window_col
    start = first_row(window_row, window_col, W, WH, WW, PARTITIONED).to(tl.int64)
    real = token < N
    if HAS_PAD:
        start = image * 0
        place = token_rows(
            window_row, window_col, token, H, W, WH, WW, SH, SW, PARTITIONED, True, WIDE
        )
        real = real & (place >= 0)
    return window, start, place, real


@triton.jit
def load_window(
    q_ptr, k_ptr, v_ptr, pad_ptr, image, start, place, token, head,
    q_stride_image, q_stride_row, k_stride_image, k_stride_row, v_stride_image, v_stride_row,
    N: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PARTITIONED: tl.constexpr, HAS_PAD: tl.constexpr,
):  # fmt: skip
    """q, k and v ``[NP, BLOCK_D]`` of one window; the pointers are those of the head."""
    at_q = image * q_stride_image + start * q_stride_row
    at_k, at_v = at_q, at_q
    if PARTITIONED:  # in image order q, k and v have the same strides
        at_k = image * k_stride_image + start * k_stride_row
        at_v = image * v_stride_image + start * v_stride_row
    pad_q = pad_ptr + head * D
    pad_k = pad_q + NH * D
    pad_v = pad_k + NH * D
    q = load_rows(q_ptr + at_q, pad_q, place, token, q_stride_row, N, D, BLOCK_D, HAS_PAD)
    k = load_rows(k_ptr + at_k, pad_k, place, token, k_stride_row, N, D, BLOCK_D, HAS_PAD)
    v = load_rows(v_ptr + at_v, pad_v, place, token, v_stride_row, N, D, BLOCK_D, HAS_PAD)
    return q, k, v

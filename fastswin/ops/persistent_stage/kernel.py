"""One kernel for all blocks of a stage; its phases are in phases.py.

    x, n, o [M, C]   h [M, HIDDEN]   stats [2, C / COLUMNS, M], partials [S, M, C] fp32

Five barriers a block instead of five launches, behind each of which only activations are fetched.
Weights come from memory (a Swin's do not survive in L2 between two images), so programs without a
head to attend ask those of the whole block, and qkv's of the next, into L2.

``ONLY`` restricts a launch to one phase: without barriers (``SYNC``) and of one block it is what
the interpreter runs, with them and of many blocks it tells how long the phase takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastswin._triton.grid_barrier import arrive
from fastswin.ops.persistent_stage.packing import COLUMNS
from fastswin.ops.persistent_stage.phases import (
    attend_phase,
    expand_phase,
    norm_phase,
    project_phase,
    shrink_phase,
    typed,
)

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _address(table_ptr, block, column: tl.constexpr):
    return tl.load(table_ptr + block * _COLUMNS + column)


@triton.jit
def _ask_into_l2(ptr, elements: tl.constexpr, part, PARTS: tl.constexpr):
    """One part of PARTS of a weight, in lines of 128 bytes."""
    line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (elements + line - 1) // line
    own: tl.constexpr = (lines + PARTS - 1) // PARTS
    at = part * own + tl.minimum(tl.arange(0, triton.next_power_of_2(own)), own - 1)
    at = tl.minimum(at, lines - 1) * line
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [(ptr + at).to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_block", "end_block"])
def _persistent_stage_kernel(
    x_ptr, n_ptr, o_ptr, stats_ptr, h_ptr, partials_ptr, weights_ptr, counter_ptr, bias_tables_ptr,
    scale, eps, first_block, end_block,
    M: tl.constexpr, C: tl.constexpr, CA: tl.constexpr, CB: tl.constexpr, HIDDEN: tl.constexpr,
    NH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, WH: tl.constexpr, WW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, NP: tl.constexpr, SLICES: tl.constexpr,
    SA: tl.constexpr, SB: tl.constexpr, PROJ_ROWS: tl.constexpr, PROJ_COLUMNS: tl.constexpr,
    FC1_ROWS: tl.constexpr, FC1_COLUMNS: tl.constexpr, FC2_ROWS: tl.constexpr,
    FC2_COLUMNS: tl.constexpr, WIDTH: tl.constexpr, THREE: tl.constexpr,
    NORM_ROWS: tl.constexpr, PROGRAMS: tl.constexpr, PREFETCH: tl.constexpr, ONLY: tl.constexpr,
    SYNC: tl.constexpr,
):  # fmt: skip
    """``bias_tables_ptr`` only tells their dtype; ``goal`` counts the arrivals so far."""
    PARTS: tl.constexpr = C // PROJ_COLUMNS
    WINDOWS: tl.constexpr = M // (WH * WW)
    IDLE: tl.constexpr = PROGRAMS - WINDOWS * NH
    PROJ_FIRST: tl.constexpr = WINDOWS * NH
    FC1_FIRST: tl.constexpr = PROJ_FIRST + (M + PROJ_ROWS - 1) // PROJ_ROWS * PARTS
    FC1_TILES: tl.constexpr = (M + FC1_ROWS - 1) // FC1_ROWS * (HIDDEN // FC1_COLUMNS)
    FC2_FIRST: tl.constexpr = FC1_FIRST + FC1_TILES
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    TABLE: tl.constexpr = bias_tables_ptr.dtype.element_ty
    block = first_block
    goal = 0
    if ONLY == "all" or ONLY == "norm":
        norm_phase(
            x_ptr, n_ptr, partials_ptr, stats_ptr, counter_ptr, goal, eps, M, WIDTH,
            THREE, 0, NORM_ROWS, SYNC,
        )  # fmt: skip
        arrive(counter_ptr, SYNC)
        goal += PROGRAMS
    qkv = _address(weights_ptr, block, 0)
    qkv_bias = _address(weights_ptr, block, 1)
    table = _address(weights_ptr, block, 2)
    shifted = _address(weights_ptr, block, 3).to(tl.int32)
    while block < end_block:
        proj = _address(weights_ptr, block, 4)
        proj_bias = _address(weights_ptr, block, 5)
        fc1 = _address(weights_ptr, block, 6)
        fc1_bias = _address(weights_ptr, block, 7)
        fc1_sums = _address(weights_ptr, block, 8)
        fc2 = _address(weights_ptr, block, 9)
        fc2_bias = _address(weights_ptr, block, 10)
        following = tl.minimum(block + 1, end_block - 1)
        if ONLY == "all" or ONLY == "attend":
            if PREFETCH and IDLE > 0:
                part = tl.program_id(0) - (PROGRAMS - IDLE)
                if part >= 0:
                    _ask_into_l2(typed(proj, HALF), C * C, part, IDLE)
                    _ask_into_l2(typed(fc1, HALF), C * HIDDEN, part, IDLE)
                    _ask_into_l2(typed(fc2, HALF), C * HIDDEN, part, IDLE)
                    ahead = _address(weights_ptr, following, 0)
                    _ask_into_l2(typed(ahead, HALF), 3 * C * C, part, IDLE)
            attend_phase(
                n_ptr, o_ptr, typed(qkv, HALF), typed(qkv_bias, tl.float32), typed(table, TABLE),
                shifted, counter_ptr, goal, scale, WINDOWS, NH, C, CA, CB, H, W, WH, WW, SH, SW,
                NP, SYNC,
            )  # fmt: skip
            arrive(counter_ptr, SYNC)
            goal += PROGRAMS
        if ONLY == "all" or ONLY == "project":
            project_phase(
                o_ptr, x_ptr, stats_ptr, typed(proj, HALF), typed(proj_bias, tl.float32),
                counter_ptr, goal, M, C, CA, CB, PROJ_ROWS, PROJ_COLUMNS,
                PROJ_FIRST, SYNC,
            )  # fmt: skip
            arrive(counter_ptr, SYNC)
            goal += PROGRAMS
        if ONLY == "all" or ONLY == "expand":
            expand_phase(
                x_ptr, stats_ptr, h_ptr, typed(fc1, HALF), typed(fc1_bias, tl.float32),
                typed(fc1_sums, tl.float32), counter_ptr, goal, eps, M, C, HIDDEN, CA, CB, PARTS,
                FC1_ROWS, FC1_COLUMNS, FC1_FIRST, SYNC,
            )  # fmt: skip
            arrive(counter_ptr, SYNC)
            goal += PROGRAMS
        if ONLY == "all" or ONLY == "shrink":
            shrink_phase(
                h_ptr, partials_ptr, typed(fc2, HALF), counter_ptr, goal, M, C, HIDDEN, SLICES,
                SA, SB, FC2_ROWS, FC2_COLUMNS, FC2_FIRST, SYNC,
            )  # fmt: skip
            arrive(counter_ptr, SYNC)
            goal += PROGRAMS
        if ONLY == "all" or ONLY == "join":
            qkv = _address(weights_ptr, following, 0)
            qkv_bias = _address(weights_ptr, following, 1)
            table = _address(weights_ptr, following, 2)
            shifted = _address(weights_ptr, following, 3).to(tl.int32)
            norm_phase(
                x_ptr, n_ptr, partials_ptr, typed(fc2_bias, tl.float32), counter_ptr, goal, eps,
                M, WIDTH, THREE, SLICES, NORM_ROWS, SYNC,
            )  # fmt: skip
            arrive(counter_ptr, SYNC)
            goal += PROGRAMS
        block += 1

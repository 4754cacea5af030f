"""Tiles of each operator that are worth trying, for :func:`fastswin.tuning.space.candidates`.

Cut by two estimates: work for every multiprocessor, and no more than a few hundred tiles for each
of them. From :data:`MANY_ROWS` rows up they are cut further, to the region where every winner of
the first runs on a card lay.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2
from fastswin.ops.hopper_gemm.config import DEFAULT_CONFIG, HopperGemmConfig, schedule
from fastswin.ops.hopper_resident.config import ResidentMlpConfig, ResidentProductConfig
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    LinearConfig,
    NormLinearConfig,
    OneShotConfig,
    default_one_shot_config,
    one_shot_blocker,
)
from fastswin.ops.mlp.config import MlpConfig
from fastswin.ops.streamed_mlp.config import ROUND_US, StreamedMlpConfig
from fastswin.ops.window_attention.config import (
    MAX_RUN_WINDOW,
    MIN_RUN,
    WindowAttentionConfig,
    key_tiles,
)
from fastswin.tuning.card import Card
from fastswin.tuning.problem import KernelProblem, LaunchConfig

#: Output tiles of the GEMM that are tried, rows x columns.
GEMM_TILES = (
    (16, 32), (16, 64), (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128),
    (128, 256), (256, 128),
)  # fmt: skip

#: The largest, for products of at least as many columns and channels.
LARGE_TILES, LARGE_TILE_COLUMNS, LARGE_TILE_K = {(128, 256), (256, 128)}, 1024, 384

#: Rows from which no winner of a product has sides below 64, operands by pointers or LayerNorm
#: under 8 warps (92 launches of Swin-T at batches 1 to 64, H200).
MANY_ROWS = 1024

#: Tiles of the Hopper product that are tried beside the one the engine takes.
HOPPER_TILES = (
    DEFAULT_CONFIG,
    dataclasses.replace(DEFAULT_CONFIG, warps=4, bias_first=False),
    HopperGemmConfig(128, 64, 64, stages=5, groups=3, warps=4),
)

#: Tiles of queries, warps and stages for windows of more than 64 tokens whose keys are held whole.
LONG_WINDOW_TILES = ((16, 1, 2), (16, 1, 3), (32, 2, 2), (32, 2, 3), (64, 4, 2), (64, 4, 3))

#: More tiles than this for each multiprocessor: a larger tile reads less.
MAX_TILES_PER_MULTIPROCESSOR = 100

#: Most rows x channels of a product for which the forms of few rows are tried.
SMALL_PRODUCT = 1 << 20

#: Registers of a program, in fp32 values, that an accumulator may take.
MAX_ACCUMULATOR = 256 * 128


def _hopper(problem: KernelProblem, card: Card) -> Iterator[HopperGemmConfig]:
    """Where a warp group of each program has a tile of its own; why_invalid knows the rest."""
    d = problem.dims
    if card.capability[0] != 9 or problem.itemsize != 2 or d["residual"]:
        return
    for config in HOPPER_TILES:
        found = schedule(problem.rows, d["N"], d["K"], config, card.multiprocessors, halve=True)
        if found.rounds or found.tiles >= config.groups * card.multiprocessors:
            yield config


def propose_gemm(problem: KernelProblem, card: Card) -> Iterator[LinearConfig | HopperGemmConfig]:
    M, N, K = problem.rows, problem.dims["N"], problem.dims["K"]
    yield from _hopper(problem, card)
    yield from _few_rows(M, N, K, card)
    many = M >= MANY_ROWS and card.capability >= (9, 0)
    for block_m, block_n in GEMM_TILES:
        if many and min(block_m, block_n) < 64:
            continue
        large = (block_m, block_n) in LARGE_TILES
        if large and (N < LARGE_TILE_COLUMNS or K < LARGE_TILE_K):
            continue
        tiles = cdiv(M, block_m) * cdiv(N, block_n)
        if tiles > MAX_TILES_PER_MULTIPROCESSOR * card.multiprocessors:
            continue
        small = block_m * block_n <= 64 * 64
        if not small and tiles < card.multiprocessors // 3:  # most of the card would idle
            continue
        if block_n >= 2 * N or (block_m > 16 and block_m >= 2 * M):
            continue
        tma = card.capability >= (9, 0) and block_m >= 64
        warps = (4,) if block_m * block_n < 128 * 128 else (4, 8)
        if block_m * block_n > 128 * 128:
            warps = (8,)
        deep = small and M < 4 * MANY_ROWS
        for block_k, num_warps in itertools.product((128, 64) if deep else (64,), warps):
            if block_k > next_power_of_2(K):
                continue
            tile = (block_m, block_n, block_k, num_warps)
            if (
                small and not many
            ) or not tma:  # operands by pointers lose to the copy engine on large tiles
                yield from (GemmConfig(*tile, stages) for stages in (3, 4))
            if tma:
                yield from (GemmConfig(*tile, stages, tma=True) for stages in (3, 4))
            if tma and tiles > card.multiprocessors:
                yield GemmConfig(*tile, 3, True, persistent=3 if small else 2)
                yield GemmConfig(*tile, 4, True, persistent=1)


def _few_rows(M: int, N: int, K: int, card: Card) -> Iterator[Any]:
    """Forms without a long chain over K, where there are too few rows to fill a card twice."""
    if M > MANY_ROWS or M * K > SMALL_PRODUCT or card.capability < (8, 0):
        return
    programs = card.multiprocessors
    if one_shot_blocker(K) is None:
        default = default_one_shot_config(M, N, K, programs)
        for block_m, block_n in ((16, 32), (32, 32), (32, 64), (64, 64)):
            if cdiv(M, block_m) * cdiv(N, block_n) <= 4 * programs:
                for num_warps in (4, 8):
                    yield OneShotConfig(block_m, block_n, num_warps)
        yield default


def propose_layer_norm_linear(problem: KernelProblem, card: Card) -> Iterator[NormLinearConfig]:
    M, N, K = problem.rows, problem.dims["N"], problem.dims["K"]
    yield from _few_rows(M, N, K, card)
    if M >= MANY_ROWS:
        yield from (ResidentProductConfig(groups=groups) for groups in (3, 4))
    many = M >= MANY_ROWS and card.capability >= (8, 0)
    for block_m, block_n in itertools.product((64, 128) if many else (16, 32, 64, 128),
                                              (32, 64, 128)):  # fmt: skip
        if block_m * K > 128 * 192 or block_m * block_n > 128 * 64 or block_n >= 2 * N:
            continue
        row_blocks, steps = cdiv(M, block_m), cdiv(N, block_n)
        if row_blocks * steps < card.multiprocessors // 2 and block_m > 16:
            continue
        wanted = (1, *(cdiv(n * card.multiprocessors, row_blocks) for n in (1, 2)))
        # as many programs as steps need, none with less to do than the others
        splits = {cdiv(steps, cdiv(steps, min(steps, count))) for count in wanted}
        for count in sorted(splits):
            if row_blocks * count < card.multiprocessors // 3 and count < steps:
                continue
            for num_warps in (4, 8) if block_m >= 64 and not many else (4,):
                for stages in (1,) if count == steps else (2, 3):
                    yield LayerNormLinearConfig(block_m, block_n, count, num_warps, stages)


def propose_mlp(
    problem: KernelProblem, card: Card
) -> Iterator[MlpConfig | ResidentMlpConfig | StreamedMlpConfig]:
    C = problem.dims["C"]
    if problem.rows >= MANY_ROWS:
        yield from (ResidentMlpConfig(64), ResidentMlpConfig(32))
        yield from ROUND_US.get(C, ())
    copied = card.capability >= (9, 0) and problem.rows >= 4 * MANY_ROWS
    for block_m, block_h in itertools.product((32, 64, 128), (32, 64, 128)):
        if copied and block_m < 64:
            continue
        if block_m * C > MAX_ACCUMULATOR or block_m * block_h > 128 * 128:
            continue
        for num_warps in (4, 8) if block_m == 128 else (4,):
            for stages in (2, 3):
                if not copied:
                    yield MlpConfig(block_m, block_h, num_warps, stages)
                if block_m >= 64:
                    yield MlpConfig(block_m, block_h, num_warps, stages, tma=True)


def propose_window_attention(problem: KernelProblem, card: Card) -> Iterator[WindowAttentionConfig]:
    d = problem.dims
    tokens, heads = d["window_h"] * d["window_w"], d["heads"]
    tiles = key_tiles(tokens)
    if tokens <= MAX_RUN_WINDOW:
        yield from _runs(problem, card)
        yield from _short_windows(problem, card, tiles)
        return
    if tiles and problem.itemsize == 2:
        for block_q, num_warps, stages in LONG_WINDOW_TILES:
            for count in _shared_heads(problem, card):
                whole = WindowAttentionConfig(block_q, tiles, count, num_warps, stages)
                yield whole
                blocks = cdiv(tokens, block_q)
                if count == 1 and problem.rows * heads < 2 * card.multiprocessors:
                    yield dataclasses.replace(whole, query_splits=blocks)
    for block_k, stages in ((64, 2), (64, 3), (32, 2), (32, 3)):
        yield WindowAttentionConfig(64, (), 1, 4, stages, block_k=block_k)
    yield WindowAttentionConfig(128, (), 1, 8, 2)


def _runs(problem: KernelProblem, card: Card) -> Iterator[WindowAttentionConfig]:
    """Many short windows: programs that walk over them with the bias in registers."""
    d = problem.dims
    tokens = d["window_h"] * d["window_w"]
    if problem.itemsize != 2 or problem.rows * d["heads"] < MIN_RUN * 2 * card.multiprocessors:
        return
    tiles = key_tiles(tokens)
    for each, stages in itertools.product((2, 3, 4), (3, 4)):
        programs = each * card.multiprocessors
        yield WindowAttentionConfig(sum(tiles), tiles, 1, 4, stages, programs=programs)


def _short_windows(
    problem: KernelProblem, card: Card, tiles: tuple[int, ...]
) -> Iterator[WindowAttentionConfig]:
    """Up to 64 tokens: one tile of keys."""
    tokens = problem.dims["window_h"] * problem.dims["window_w"]
    largest = max(MIN_DOT, next_power_of_2(tokens))
    for block_q, count in itertools.product((16, 32, 64), _shared_heads(problem, card)):
        programs = problem.rows * (problem.dims["heads"] // count)
        # queries of one window fit one tile; more of them read the keys again
        if block_q > largest or (block_q < largest and programs >= 2 * card.multiprocessors):
            continue
        for num_warps in (2, 4) if block_q < 64 else (4,):
            for stages in (1,) if count == 1 else (2, 3):
                whole = WindowAttentionConfig(block_q, tiles, count, num_warps, stages)
                yield whole
                blocks = cdiv(tokens, block_q)
                if count == 1 and blocks > 1 and programs < 2 * card.multiprocessors:
                    yield dataclasses.replace(whole, query_splits=blocks)


def _shared_heads(problem: KernelProblem, card: Card) -> list[int]:
    """Heads that one program may walk over, with work left for every multiprocessor."""
    heads = problem.dims["heads"]
    divisors = (n for n in range(1, min(heads, 12) + 1) if heads % n == 0)
    return [n for n in divisors if n == 1 or problem.rows * (heads // n) >= card.multiprocessors]


#: By operator.
PROPOSALS: dict[str, Callable[[KernelProblem, Card], Iterator[LaunchConfig]]] = {
    "linear": propose_gemm,
    "layer_norm_linear": propose_layer_norm_linear,
    "mlp": propose_mlp,
    "window_attention": propose_window_attention,
}

"""Which configurations are worth compiling for a problem, and which can run at all.

A list per operator, the heuristic's choice first, cut by three estimates: shared memory for the
pipelined operands, work for every multiprocessor, and no more than a few hundred tiles for each of
them. The estimates only prune; what a kernel really takes is read from the compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fastswin._triton.tiles import MIN_DOT, cdiv, next_power_of_2
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    LinearConfig,
    NormLinearConfig,
    OneShotConfig,
    default_gemm_config,
    default_layer_norm_linear_config,
    default_one_shot_config,
    one_shot_blocker,
)
from fastswin.ops.mlp.config import MlpConfig, default_mlp_config
from fastswin.ops.window_attention.config import (
    WindowAttentionConfig,
    default_config,
    key_tiles,
)
from fastswin.tuning.card import Card
from fastswin.tuning.problem import KernelProblem, LaunchConfig

#: Output tiles of the GEMM that are tried, rows x columns.
GEMM_TILES = (
    (16, 32), (16, 64), (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128),
    (64, 256), (128, 256), (256, 128),
)  # fmt: skip

#: More tiles than this for each multiprocessor: a larger tile reads less.
MAX_TILES_PER_MULTIPROCESSOR = 100

#: Most rows x channels of a product for which the forms of few rows are tried.
SMALL_PRODUCT = 1 << 20

#: Registers of a program, in fp32 values, that an accumulator may take.
MAX_ACCUMULATOR = 256 * 128


def default_for(problem: KernelProblem, card: Card) -> LaunchConfig | None:
    """The heuristic's choice; None where the operator has none for this problem."""
    d, rows = problem.dims, problem.rows
    if problem.op == "linear":
        return default_gemm_config(rows, d["N"], d["K"], card.multiprocessors, card.capability)
    if problem.op == "layer_norm_linear":
        return default_layer_norm_linear_config(
            rows, d["N"], d["K"], card.multiprocessors, card.capability
        )
    if problem.op == "mlp":
        return default_mlp_config(d["C"], card.capability)
    if problem.op == "window_attention":
        return default_config(
            rows, d["window_h"] * d["window_w"], d["heads"], d["head_dim"], problem.itemsize,
            card.multiprocessors, card.capability,
        )  # fmt: skip
    return None


def candidates(problem: KernelProblem, card: Card) -> list[LaunchConfig]:
    """Configurations to try, the heuristic's first; empty where there is nothing to choose."""
    default = default_for(problem, card)
    if default is None:
        return []
    lists: dict[str, Callable[[KernelProblem, Card], Iterator[LaunchConfig]]] = {
        "linear": _gemm,
        "layer_norm_linear": _layer_norm_linear,
        "mlp": _mlp,
        "window_attention": _window_attention,
    }
    found = lists[problem.op](problem, card)
    legal = (c for c in found if why_invalid(problem, c, card.capability) is None)
    fits = (c for c in legal if operand_bytes(problem, c) <= card.shared_bytes)
    return list(dict.fromkeys([default, *fits]))


def why_invalid(
    problem: KernelProblem, config: LaunchConfig, capability: tuple[int, int]
) -> str | None:
    """Reason why a configuration cannot run a problem, None where it can."""
    if getattr(config, "tma", False) and capability < (9, 0):
        return f"tma needs compute capability 9.0, this GPU has {capability[0]}.{capability[1]}"
    d = problem.dims
    if isinstance(config, GemmConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
        if config.tma and (d["K"] % 8 or d["N"] % 8):
            return f"tma needs N and K to be multiples of 8, got {d['N']} and {d['K']}"
        if config.persistent < 0 or (config.persistent and not config.tma):
            return f"persistent={config.persistent} needs tma"
    elif isinstance(config, LayerNormLinearConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n}
        steps = cdiv(d["N"], config.block_n)
        if not 1 <= config.column_splits <= steps:
            return f"column_splits={config.column_splits} is not in [1, {steps}]"
    elif isinstance(config, OneShotConfig):
        sides = {"block_m": config.block_m, "block_n": config.block_n}
        if blocker := one_shot_blocker(d["K"]):
            return blocker
    elif isinstance(config, MlpConfig):
        sides = {"block_m": config.block_m, "block_h": config.block_h}
        if d["hidden"] % config.block_h:
            return f"block_h={config.block_h} does not divide {d['hidden']} hidden channels"
    else:
        sides = {"block_q": config.block_q}
        tokens = d["window_h"] * d["window_w"]
        if config.heads_per_program < 1 or d["heads"] % config.heads_per_program:
            return f"heads_per_program={config.heads_per_program} does not divide {d['heads']}"
        if config.key_tiles and config.key_tiles != key_tiles(tokens):
            return f"key_tiles={config.key_tiles} do not hold {tokens} keys"
        if not config.key_tiles and (config.heads_per_program, config.query_splits) != (1, 1):
            return "the online form has one head and query tile a program"
        if not 1 <= config.query_splits <= cdiv(tokens, max(1, config.block_q)):
            return f"query_splits={config.query_splits} exceed the tiles of {tokens} queries"
    for name, side in sides.items():
        if side < MIN_DOT or side & (side - 1):
            return f"{name}={side} is no power of two of at least {MIN_DOT}"
    if config.num_warps not in (1, 2, 4, 8, 16, 32):
        return f"num_warps={config.num_warps} is no power of two in [1, 32]"
    return None if getattr(config, "num_stages", 1) >= 1 else "num_stages must be at least 1"


def operand_bytes(problem: KernelProblem, config: LaunchConfig) -> int:
    """Shared memory that pipelined operands take at least, in bytes; for pruning."""
    d, size = problem.dims, problem.itemsize
    if isinstance(config, GemmConfig):
        return (config.block_m + config.block_n) * config.block_k * size * config.num_stages
    if isinstance(config, OneShotConfig):  # operands lie in registers, exchanged part by part
        return (config.block_m + config.block_n) * 32 * size
    if isinstance(config, LayerNormLinearConfig):
        return config.block_n * d["K"] * size * config.num_stages
    if isinstance(config, MlpConfig):
        return 2 * config.block_h * d["C"] * size * config.num_stages
    width = max(MIN_DOT, next_power_of_2(d["head_dim"]))
    keys = sum(config.key_tiles) or 64
    return 2 * keys * width * size * max(1, config.num_stages - 1)


def _gemm(problem: KernelProblem, card: Card) -> Iterator[LinearConfig]:
    M, N, K = problem.rows, problem.dims["N"], problem.dims["K"]
    yield from _few_rows(M, N, K, card)
    for block_m, block_n in GEMM_TILES:
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
        for block_k, num_warps in itertools.product((128, 64) if small else (64,), warps):
            if block_k > next_power_of_2(K):
                continue
            tile = (block_m, block_n, block_k, num_warps)
            if small or not tma:  # operands by pointers lose to the copy engine on large tiles
                yield from (GemmConfig(*tile, stages) for stages in (3, 4))
            if tma:
                yield from (GemmConfig(*tile, stages, tma=True) for stages in (3, 4))
            if tma and tiles > card.multiprocessors:
                yield GemmConfig(*tile, 3, True, persistent=3 if small else 2)
                yield GemmConfig(*tile, 4, True, persistent=1)


def _few_rows(M: int, N: int, K: int, card: Card) -> Iterator[Any]:
    """Forms without a long chain over K, where there are too few rows to fill a card twice."""
    if M * K > SMALL_PRODUCT or card.capability < (8, 0):
        return
    programs = card.multiprocessors
    if one_shot_blocker(K) is None:
        default = default_one_shot_config(M, N, K, programs)
        for block_m, block_n in ((16, 32), (32, 32), (32, 64), (64, 64)):
            if cdiv(M, block_m) * cdiv(N, block_n) <= 4 * programs:
                for num_warps in (4, 8):
                    yield OneShotConfig(block_m, block_n, num_warps)
        yield default


def _layer_norm_linear(problem: KernelProblem, card: Card) -> Iterator[NormLinearConfig]:
    M, N, K = problem.rows, problem.dims["N"], problem.dims["K"]
    yield from _few_rows(M, N, K, card)
    for block_m, block_n in itertools.product((16, 32, 64, 128), (32, 64, 128)):
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
            for num_warps in (4, 8) if block_m >= 64 else (4,):
                for stages in (1,) if count == steps else (2, 3):
                    yield LayerNormLinearConfig(block_m, block_n, count, num_warps, stages)


def _mlp(problem: KernelProblem, card: Card) -> Iterator[MlpConfig]:
    C = problem.dims["C"]
    for block_m, block_h in itertools.product((32, 64, 128), (32, 64, 128)):
        if block_m * C > MAX_ACCUMULATOR or block_m * block_h > 128 * 128:
            continue
        for num_warps in (4, 8) if block_m == 128 else (4,):
            for stages in (2, 3):
                yield MlpConfig(block_m, block_h, num_warps, stages)
                if block_m >= 64:
                    yield MlpConfig(block_m, block_h, num_warps, stages, tma=True)


def _window_attention(problem: KernelProblem, card: Card) -> Iterator[WindowAttentionConfig]:
    d = problem.dims
    tokens, heads = d["window_h"] * d["window_w"], d["heads"]
    tiles = key_tiles(tokens)
    largest = max(MIN_DOT, next_power_of_2(tokens))
    half = problem.itemsize == 2
    if tiles and (half or tokens <= 64):
        shared = [n for n in range(1, min(heads, 12) + 1) if heads % n == 0]
        for block_q, count in itertools.product((16, 32, 64, 128), shared):
            if block_q > largest or (block_q == 128 and tokens <= 128):
                continue
            programs = problem.rows * (heads // count)
            if count > 1 and programs < card.multiprocessors:
                continue
            for num_warps in (4, 8) if block_q == 128 else ((2, 4) if block_q < 64 else (4,)):
                for stages in (1,) if count == 1 else (2, 3):
                    whole = WindowAttentionConfig(block_q, tiles, count, num_warps, stages)
                    yield whole
                    blocks = cdiv(tokens, block_q)
                    if count == 1 and blocks > 1 and programs < 2 * card.multiprocessors:
                        yield dataclasses.replace(whole, query_splits=blocks)
    if tokens > 64:
        for block_q, stages in itertools.product((32, 64, 128), (1, 2, 3)):
            if block_q <= largest:
                for num_warps in (4, 8) if block_q == 128 else (4,):
                    yield WindowAttentionConfig(block_q, (), 1, num_warps, stages)

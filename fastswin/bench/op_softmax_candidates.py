"""Launch configurations of the softmax problems that a sweep tries, without the hopeless ones."""

from __future__ import annotations

from collections.abc import Iterator

from fastswin.bench.op_softmax_problems import SoftmaxProblem
from fastswin.ops.masked_softmax.config import MAX_PAIRED_ROW, SoftmaxConfig, next_power_of_2

WARP_LANES = 32


def configurations(problem: SoftmaxProblem, direction: str) -> list[SoftmaxConfig | None]:
    """Candidates of one problem; None, the default, first."""
    keys, itemsize = problem.shape[-1], problem.torch_dtype.itemsize
    vector = 16 // itemsize
    while keys % vector:
        vector //= 2
    found = list(_whole_rows(problem, keys, vector, direction))
    if problem.kind == "window" and keys % 2 and keys <= MAX_PAIRED_ROW and itemsize == 2:
        found = list(_paired_rows(keys, direction))
    if keys >= 16384:
        found += list(_long_rows(keys, vector, direction))
    return [None, *dict.fromkeys(found)]


def _whole_rows(
    problem: SoftmaxProblem, keys: int, vector: int, direction: str
) -> Iterator[SoftmaxConfig]:
    looped = problem.kind in ("masked", "window") and direction == "forward"
    looped = looped or (problem.kind == "window" and direction == "backward")
    least = 24 if keys < 64 else 12
    limit = 80 if direction == "forward" and not looped else 64
    for warps in (1, 2, 4, 8, 16):
        for lanes in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            block = lanes * vector
            if block > 2 * next_power_of_2(keys) or lanes > WARP_LANES * warps * 2:
                continue
            chunks = -(-keys // block)
            if chunks > (4 if problem.kind == "tril" else 16):
                continue
            for rows in (1, 2, 4, 8, 16, 32, 64, 128):
                threads = WARP_LANES * warps
                held = rows * chunks * block / threads
                if rows * block < threads * vector or not least <= held <= limit:
                    continue
                if chunks * block > 1.35 * keys:
                    continue
                yield SoftmaxConfig(rows, block, warps)
                if looped and held >= 24:
                    yield SoftmaxConfig(rows, block, warps, steps=8)


def _paired_rows(keys: int, direction: str) -> Iterator[SoftmaxConfig]:
    for lanes, warps in ((8, 1), (8, 2), (8, 4), (16, 1), (16, 2)):
        rows = 2 * warps * WARP_LANES // lanes  # one pair per thread
        if direction == "forward":
            for steps in (0, 2, 3, 4, 6, 8, 16, 24):
                for ahead in (False, True):
                    yield SoftmaxConfig(rows, lanes, warps, steps=steps, paired=True, ahead=ahead)
            continue
        for programs in (8, 12, 16, 24, 32, 48, 64, 96):
            if programs * warps <= 128:
                for ahead in (False, True):
                    yield SoftmaxConfig(
                        rows, lanes, warps, paired=True, ahead=ahead,
                        programs_per_multiprocessor=programs,
                    )  # fmt: skip


def _long_rows(keys: int, vector: int, direction: str) -> Iterator[SoftmaxConfig]:
    for warps in (8, 16, 32):
        for vectors in (1, 2, 4):
            block = WARP_LANES * warps * vector * vectors
            if block * 2 > keys:
                continue
            for kept in (0, 2, 4, 6):
                tensors = 1 if direction == "forward" else 2
                if kept * vectors * vector * tensors <= 2048 // warps:
                    yield SoftmaxConfig(1, block, warps, long=True, kept=kept)

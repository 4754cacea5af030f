"""Forms and tiles to try for a layer of few rows: the engine's own, then the most promising."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fastswin._triton.tiles import cdiv
from fastswin.bench.small_batch_layers import Form, Layer
from fastswin.ops.linear.config import (
    OneShotConfig,
    default_gemm_config,
    default_layer_norm_linear_config,
    default_one_shot_config,
    one_shot_blocker,
)


def forms(layer: Layer, most: int, multiprocessors: int = 132) -> Iterator[Form]:
    """The engine's present form without and with programmatic launch, then ``most`` new ones."""
    M, N, K = layer.shape
    capability = (9, 0)
    if layer.name != "fc1":
        yield Form("library", None, False)
        if layer.normalised:
            yield Form("library", None, True)
    gemm = default_gemm_config(M, N, K, multiprocessors, capability)
    if layer.name != "merge":
        if layer.normalised:
            yield Form("tiled", gemm, False)
        yield Form("tiled" if layer.normalised else "fused", gemm, True)
    inside = default_layer_norm_linear_config(M, N, K, multiprocessors, capability)
    if layer.name in ("qkv", "fc1") and inside is not None and K <= 384:
        yield Form("fused", inside, False)
        yield Form("fused", inside, True)
    configs = list(dict.fromkeys(_tiles(layer, multiprocessors)))
    ranked = sorted(configs, key=lambda config: predicted_us(layer, config, multiprocessors))
    per_tile: Counter[tuple] = Counter()
    chosen = configs[:1]  # the heuristic's
    for config in ranked:
        tile = config.block_m, config.block_n
        per_tile[tile] += 1
        if per_tile[tile] <= 3 and config not in chosen and len(chosen) < most:
            chosen.append(config)
    yield from (Form("fused", config, True) for config in chosen)


def _tiles(layer: Layer, multiprocessors: int) -> Iterator[OneShotConfig]:
    M, N, K = layer.shape
    gather = layer.name == "merge"
    if one_shot_blocker(K) is not None:
        return
    yield default_one_shot_config(M, N, K, multiprocessors, gather)
    if not gather and K > 512:
        return
    for block_m, block_n in ((16, 32), (32, 32), (16, 64), (32, 64), (64, 32), (64, 64)):
        programs = cdiv(M, block_m) * cdiv(N, block_n)
        if block_m >= 2 * M or not 40 <= programs <= 4 * multiprocessors:
            continue
        values = block_m * K + block_n * K // 2 + layer.parts * block_m * block_n
        for warps in (4, 8, 16):
            threads = 32 * warps
            room = threads * min(255, 65536 // threads)
            if 0.15 * room <= values <= 1.0 * room:
                yield OneShotConfig(block_m, block_n, warps)


def predicted_us(layer: Layer, config: OneShotConfig, multiprocessors: int) -> float:
    """A launch in a programmatic chain, counted before it was measured.

    1.3 us for release, store and drain; 0.5 for the first bytes from L2; x after the wait at
    60 bytes/ns a multiprocessor, and where programs come in waves the weights of later ones too;
    33 cycles at 1.755 GHz a tensor-core step of the longest chain; 0.3 for statistics, 0.15 for
    the sum over neighbours.
    """
    M, N, K = layer.shape
    programs = cdiv(M, config.block_m) * cdiv(N, config.block_n)
    waves = cdiv(programs, multiprocessors)
    loaded = 2 * K * (waves * config.block_m + (waves - 1) * config.block_n)
    warps_on_tile = max(1, config.num_warps // layer.parts)
    tiles = cdiv(config.block_m * config.block_n, 16 * 8 * warps_on_tile)
    # one chain of K steps for every accumulator; 4 of them hide each other's latency
    steps = K / 16 / layer.parts * max(1.0, tiles / 4)
    inside = 0.3 if layer.normalised else 0.0
    summed = 0.15 if layer.parts > 1 else 0.0
    return 1.8 + loaded / 60e3 + steps * 33 / 1755 + inside + summed

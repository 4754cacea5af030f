"""How one problem is cut into programs: tile sizes, and the heuristic that picks them.

A window of ``N`` tokens is held whole by one program up to :data:`MAX_WHOLE_ROW` keys, as one or
two exact power-of-two tiles (144 = 128 + 16: padding to 256 would waste 44 % of the work); longer
windows walk over the keys with an online softmax.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import cdiv, next_power_of_2

#: Longest padded row of scores that one program keeps whole: 64 x 256 fp32 in registers.
MAX_WHOLE_ROW = 256

#: Longest window of the form that walks over windows with the bias in registers.
MAX_RUN_WINDOW = 64

#: Programs of that form, three for each of an H100's 132 multiprocessors, and windows that each has
#: to have for the form to pay.
RUN_PROGRAMS = 396
MIN_RUN = 16

#: Key tile of the online form.
ONLINE_BLOCK_K = 64

#: Longest whole row on cards with less shared memory than a Hopper or Blackwell data-centre GPU:
#: 64 x 256 scores take 172 KiB, the others have 64 to 163 KiB.
MAX_WHOLE_ROW_SMALL = 160

#: Bytes of one key (or value) tile that may live in shared memory beside its twin.
MAX_KEY_TILE_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True)
class WindowAttentionConfig:
    """Launch options of the forward kernel.

    Attributes:
        block_q: query rows per tile.
        key_tiles: one or two power-of-two key tiles whose sum is the padded row; () means online.
        heads_per_program: heads that one program walks over, loads pipelined across them.
        num_warps: warps per program; 64 query rows never pay with more than 4.
        num_stages: depth of the load pipeline over key tiles (online), else over query tiles, or
            over heads where a window is one tile of queries.
        programs: where not 0, programs at most, each of which walks over windows of one kind and
            head (forward_runs.py; up to :data:`MAX_RUN_WINDOW` tokens, no mask, no 8 bits).
        query_splits: programs that share the query tiles of one window and head, where whole rows
            of keys are held; the online form has a program for each tile anyway.
        block_k: keys per step of the online form.
    """

    block_q: int
    key_tiles: tuple[int, ...]
    heads_per_program: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 0
    query_splits: int = 1
    block_k: int = ONLINE_BLOCK_K


def key_tiles(tokens: int) -> tuple[int, ...]:
    """Exact tiles for one row of scores; () where the row is too long to keep whole."""
    if tokens <= 64:
        return (max(16, next_power_of_2(tokens)),)
    largest = 64 if tokens < 128 else 128
    rest = tokens - largest
    tail = max(16, next_power_of_2(rest)) if rest > 0 else 0
    if largest + tail > MAX_WHOLE_ROW:
        return ()
    if tail in (0, largest):  # a power of two is one tile
        return (largest + tail,)
    return largest, tail


def padded_tokens(tokens: int) -> int:
    """``NP``: length that rows and columns of the packed bias are padded to."""
    tiles = key_tiles(tokens)
    if tiles:
        return sum(tiles)
    return -(-tokens // ONLINE_BLOCK_K) * ONLINE_BLOCK_K


def default_config(
    windows: int,
    tokens: int,
    num_heads: int,
    head_dim: int,
    itemsize: int,
    multiprocessors: int,
    capability: tuple[int, int] = (9, 0),
    runs: bool = False,
    tensor_cores: bool = False,
) -> WindowAttentionConfig:
    """Heuristic from measurements on an H100 and an H200 (docs/performance.md).

    Args:
        windows: windows in the whole batch.
        tokens: tokens per window.
        num_heads, head_dim: attention heads and their channels.
        itemsize: bytes per element of q, k, v.
        multiprocessors, capability: of the GPU that runs it.
        runs: whether the problem may go in runs (V1, no mask, dropout, padding or 8 bits).
        tensor_cores: whether fp32 products are made of TF32 ones.
    """
    tiles = key_tiles(tokens)
    longest = MAX_WHOLE_ROW if capability[0] in (9, 10) else MAX_WHOLE_ROW_SMALL
    if itemsize == 4:  # 144 fp32 keys take 156 KiB and spill, 256 take 272 KiB
        longest = 64
    if sum(tiles) > longest:
        tiles = ()
    block_d = max(16, next_power_of_2(head_dim))
    if tiles and max(tiles) * block_d * itemsize > MAX_KEY_TILE_BYTES:
        tiles = ()
    widest = 64
    if capability < (8, 0):  # no tensor-core code there: operands fill the registers
        tiles = tiles if tokens <= 64 else ()
        widest = 32 if tiles and itemsize == 2 else 16
    elif capability < (9, 0) and itemsize == 4:
        widest = 32
    block_q = min(widest, max(16, next_power_of_2(tokens)))
    query_blocks = -(-tokens // block_q)
    # enough programs to fill the card three times; beyond that, longer head loops pipeline better
    wanted = 3 * multiprocessors
    heads = 1
    for candidate in range(2, min(num_heads, 6) + 1):
        programs = windows * (num_heads // candidate) * (1 if tiles else query_blocks)
        if num_heads % candidate == 0 and programs >= wanted:
            heads = candidate
    # 4,096 windows on an H200: 58.9 us with a head a program, 60.7 with three, of three products
    # 97.6 and 129.8; IEEE products are bound by their multiplications
    if itemsize == 4 and tensor_cores and capability >= (9, 0):
        heads = 1
    if capability < (8, 0):
        return WindowAttentionConfig(block_q, tiles, heads if tiles else 1, num_stages=1)
    if not tiles:
        return WindowAttentionConfig(block_q, (), 1, num_warps=4, num_stages=2)
    short = itemsize <= 2 and tokens <= MAX_RUN_WINDOW
    if runs and short and capability >= (9, 0) and windows * num_heads >= MIN_RUN * RUN_PROGRAMS:
        return WindowAttentionConfig(block_q, tiles, heads, programs=RUN_PROGRAMS)
    # a window of 256 and 16 heads: 128 programs of 32 queries (5.6 us on an H200) or 64 of 64 (6.0)
    # instead of 16 of four tiles one after another
    few = heads == 1 and windows * num_heads < 2 * multiprocessors
    if few and query_blocks > 1 and query_blocks * windows * num_heads < multiprocessors:
        block_q = min(block_q, 32)
        query_blocks = cdiv(tokens, block_q)
    splits = query_blocks if few else 1
    stages = 3 if query_blocks > 1 or (heads > 1 and short) else 2
    return WindowAttentionConfig(block_q, tiles, heads, num_stages=stages, query_splits=splits)


def num_programs(windows: int, tokens: int, num_heads: int, config: WindowAttentionConfig) -> int:
    """Programs of a launch, all in grid axis 0; ``windows`` may be a symbolic expression."""
    if config.key_tiles:
        return windows * (num_heads // config.heads_per_program * config.query_splits)
    return windows * (num_heads * cdiv(tokens, config.block_q))


def tile_constants(config: WindowAttentionConfig) -> dict[str, int]:
    """Constants and launch options that a config decides, by name."""
    constants = {"BLOCK_Q": config.block_q, "NUM_STAGES": config.num_stages}
    if not config.key_tiles:
        return constants | {"BLOCK_K": config.block_k}
    first, second = (*config.key_tiles, 0)[:2]
    split = {"QUERY_SPLITS": config.query_splits} if config.query_splits > 1 else {}
    # a launch option: Triton pipelines the inner loop, over query tiles
    constants["num_stages"] = config.num_stages
    return constants | {"K1": first, "K2": second, "HEADS": config.heads_per_program} | split

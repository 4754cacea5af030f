"""How one problem is cut into programs: tile sizes, and the heuristic that picks them.

A window of ``N`` tokens is held whole by one program up to :data:`MAX_WHOLE_ROW` keys, as one or
two exact power-of-two tiles (144 = 128 + 16: padding to 256 would waste 44 % of the work); longer
windows walk over the keys with an online softmax.
"""

from __future__ import annotations

import dataclasses

from fastswin._triton.tiles import cdiv, next_power_of_2

#: Longest padded row of scores that one program keeps whole. 256 in registers spill 170 to 480
#: bytes a thread, and the online form takes 0.55 to 0.9 of their time (H200).
MAX_WHOLE_ROW = 160

#: Longest window of the form that walks over windows with the bias in registers.
MAX_RUN_WINDOW = 64

#: Programs of that form, three for each of an H100's 132 multiprocessors, and windows that each has
#: to have for the form to pay.
RUN_PROGRAMS = 396
MIN_RUN = 16

#: Fewest pairs of a window and a head that go in runs in tf32.
MIN_TF32_RUN_PAIRS = 2048

#: Fewest tokens of a window whose bias the engine keeps in a compact table (packing.py), which only
#: the online form reads.
MIN_COMPACT_TOKENS = MAX_WHOLE_ROW + 1

#: What the width of such a window is a multiple of: vectors of 16 bytes along keys stay whole.
COMPACT_WIDTH_STEP = 8

#: Most images of a batch whose attention reads it. One image reads each table once, from memory:
#: SwinV2-B and L with windows of 24 take 1 to 3 % less time with a 12th of the bytes. More find a
#: table in L2, where rows of the dense one are aligned to lines: SwinV2-L is 1, 4 and 5 % faster at
#: 2, 4 and 8 so, SwinV2-B up to 1 at 2 and 4 (H200).
MAX_COMPACT_IMAGES = 1

#: Key tile of the online form.
ONLINE_BLOCK_K = 64

#: Bytes of one key (or value) tile that may live in shared memory beside its twin.
MAX_KEY_TILE_BYTES = 32 * 1024


@dataclasses.dataclass(frozen=True)
class WindowAttentionConfig:
    """Launch options of the forward kernel.

    Attributes:
        block_q: query rows per tile.
        key_tiles: one or two power-of-two key tiles whose sum is the padded row; () means online.
        heads_per_program: heads that one program walks over, loads pipelined across them.
        num_warps: warps per program, one for each 16 query rows; more never paid.
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


def takes_compact_bias(window_size: tuple[int, int], images: int) -> bool:
    """Whether inference of a batch reads the bias of such windows from a compact table."""
    height, width = window_size
    fits = height * width >= MIN_COMPACT_TOKENS and width % COMPACT_WIDTH_STEP == 0
    return fits and images <= MAX_COMPACT_IMAGES


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
    table_itemsize: int = 2,
    tf32: bool = False,
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
        table_itemsize: bytes per element of the packed bias.
        tf32: whether one of them is all there is.
    """
    tiles = key_tiles(tokens)
    longest = 64 if itemsize == 4 else MAX_WHOLE_ROW  # 144 fp32 keys take 156 KiB and spill
    if tf32 and capability[0] in (9, 10) and windows * num_heads >= 2 * multiprocessors:
        longest = 144  # 24.5 us on an H200 where the online form takes 34.8
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
    # 6,144 pairs of 49 tokens on an H200: three TF32 products 99.8 us with a head a program, 129.6
    # with three; in tf32 59 to 64 with either, and V2 4 % of a model less with one
    if itemsize == 4 and tensor_cores and capability >= (9, 0):
        heads = 1
    if capability < (8, 0):
        return WindowAttentionConfig(block_q, tiles, heads if tiles else 1, num_stages=1)
    if not tiles:
        # 4 to 6 % faster with a third stage where tables are fp16, as much slower where fp32
        stages = 3 if itemsize <= 2 and table_itemsize == 2 else 2
        return WindowAttentionConfig(block_q, (), 1, num_warps=4, num_stages=stages)
    if tokens > MAX_RUN_WINDOW and tf32:
        return WindowAttentionConfig(block_q, tiles, 1, num_stages=2)
    if tokens > MAX_RUN_WINDOW:
        return _long_whole_rows(tiles, windows * num_heads, tokens, multiprocessors)
    short = itemsize <= 2
    if runs and short and capability >= (9, 0) and windows * num_heads >= MIN_RUN * RUN_PROGRAMS:
        return WindowAttentionConfig(block_q, tiles, heads, programs=RUN_PROGRAMS)
    # 6,144 pairs 56.4 us instead of 64.1, 2,048 pairs 23.1 instead of 24.8 (V2 takes twice as long)
    if runs and tf32 and capability >= (9, 0) and windows * num_heads >= MIN_TF32_RUN_PAIRS:
        return WindowAttentionConfig(block_q, tiles, 1, num_stages=2, programs=RUN_PROGRAMS)
    few = query_blocks > 1 and heads == 1 and windows * num_heads < 2 * multiprocessors
    stages = 3 if query_blocks > 1 or (heads > 1 and short) else 2
    splits = query_blocks if few else 1
    return WindowAttentionConfig(block_q, tiles, heads, num_stages=stages, query_splits=splits)


def _long_whole_rows(
    tiles: tuple[int, ...], pairs: int, tokens: int, multiprocessors: int
) -> WindowAttentionConfig:
    """Windows of more than one tile of queries, ``pairs`` of a window and a head.

    With 144 tokens on an H200, us with 64 queries shared by three programs, with 64 and with 32
    not shared: 64 pairs 5.1, 6.0, 8.9; 256 pairs 11.0, 9.0, 10.1; 8,192 pairs -, 210, 183.
    """
    if pairs >= 2 * multiprocessors:
        return WindowAttentionConfig(32, tiles, 1, num_warps=2, num_stages=2)
    blocks = cdiv(tokens, 64)
    if blocks * pairs >= 2 * multiprocessors:
        return WindowAttentionConfig(64, tiles, 1, num_warps=4, num_stages=3)
    if blocks * pairs >= multiprocessors:
        return WindowAttentionConfig(64, tiles, 1, num_warps=4, num_stages=3, query_splits=blocks)
    blocks = cdiv(tokens, 32)
    return WindowAttentionConfig(32, tiles, 1, num_warps=2, num_stages=3, query_splits=blocks)


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

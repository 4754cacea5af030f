"""Product with an expensive epilogue on Hopper: one warp loads, groups of warps take turns.

    forward     y = act(x w' + bias)                    x [M, K]   w [N, K]   y [M, N]
    training    pre = x w' + bias, act = gelu(pre)      of pre as rounded for memory
    backward    dpre = (dy w) * gelu'(pre), act = gelu(pre), column sums of dpre per row tile
                                                        dy [M, K]  w [K, N]   pre [M, N]

A program walks over output tiles; its i-th tile belongs to warp group ``i % GROUPS``. All draw from
one ring of operand tiles, filled in the order of output tiles, so that the groups run half a period
apart: while one applies GELU to its accumulator and stores it, another's products have the tensor
cores. In Triton's own dialect the epilogue of a tile and the products of the next take turns.

Barriers need no state: step k of the i-th tile is step ``g = i * steps + k`` of the program, it
lies in slot ``g % STAGES`` and is that slot's ``g // STAGES``-th filling, whose parity is the phase
to wait for. A group releases a slot once its products have been waited for; the first filling of a
slot waits for the phase before the first, which a fresh barrier counts as complete.

A phase is known by its parity only, so nobody may wait for a filling before the one ahead of it has
come. A group skips the others' tiles: it starts the products of tile i when those of tile i - 1
have all been issued (``turn``). That also keeps the tensor cores to one tile at a time.

Tiles beyond the last full round would leave most multiprocessors idle; where each program then has
one at most, they are cut into a left and a right half (``HALVES``, forward only).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastswin._triton.gluon_tiles import buffers
from fastswin._triton.math import gelu, gelu_and_slope
from fastswin._triton.pdl import wait_for_previous


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """Room for barriers."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def _start_barriers(
    full, empty, turn, staged, unstaged,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """One arrival completes each. In turn: the compiler synchronises between two of a kind."""
    for i in gl.static_range(STAGES if STAGES > GROUPS else GROUPS):
        if i < STAGES:
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        if i < GROUPS:
            mbarrier.init(turn.index(i), count=1)
            if BACKWARD:
                mbarrier.init(staged.index(i), count=1)
                mbarrier.init(unstaged.index(i), count=1)
    fence_async_shared()


@gluon.jit
def _tile(i, rounds, tiles_n, BLOCK_N: gl.constexpr, HALVES: gl.constexpr):
    """Row tile, first column and whether it is half of this program's i-th tile.

    Columns fastest, so that neighbours share rows. With HALVES each program has ``rounds`` whole
    tiles; then come the left and right halves of those that would not fill another round.
    """
    tile = gl.program_id(0) + i * gl.num_programs(0)
    if HALVES:
        half = i == rounds
        if half:
            tile = rounds * gl.num_programs(0) + gl.program_id(0) // 2
        col = tile % tiles_n * BLOCK_N
        if half:
            col += gl.program_id(0) % 2 * (BLOCK_N // 2)
        return tile // tiles_n, col, half
    else:
        return tile // tiles_n, tile % tiles_n * BLOCK_N, gl.to_tensor(False)


@gluon.jit
def _load_tiles(
    x_desc, w_desc, pre_desc, x_ring, w_ring, staging, full, empty, staged, unstaged, count, rounds,
    steps, tiles_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, BUFFERS: gl.constexpr, BACKWARD: gl.constexpr, HALVES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: operands of every step, and in the backward ``pre`` of every tile.

    Weights of half a tile come with their neighbours', which nobody reads. Everything that the
    groups do follows from what is loaded here, so the one wait for the kernel before is here.
    """
    wait_for_previous(PDL)
    for i in range(count):
        tile_m, col, _ = _tile(i, rounds, tiles_n, BLOCK_N, HALVES)
        row = tile_m * BLOCK_M
        for k in range(steps):
            step = i * steps + k
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
            ready = full.index(slot)
            mbarrier.expect(ready, x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(x_desc, [row, k * BLOCK_K], ready, x_ring.index(slot))
            if BACKWARD:
                at = [k * BLOCK_K, col]
            else:
                at = [col, k * BLOCK_K]
            tma.async_copy_global_to_shared(w_desc, at, ready, w_ring.index(slot))
        if BACKWARD:
            CHUNK: gl.constexpr = pre_desc.block_type.shape[1]
            CHUNKS: gl.constexpr = BLOCK_N // CHUNK
            group = i % GROUPS
            mbarrier.wait(unstaged.index(group), (i // GROUPS & 1) ^ 1)
            mbarrier.expect(staged.index(group), CHUNKS * pre_desc.block_type.nbytes)
            for c in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    pre_desc, [row, col + c * CHUNK], staged.index(group),
                    staging.index(group * BUFFERS + c),
                )  # fmt: skip


@gluon.jit
def _begin_sums(
    bias_ptr, col, N, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, BIAS_FIRST: gl.constexpr,
    EVEN_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What a tile's sums start from."""
    acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, LAYOUT)
    if BIAS_FIRST:  # it has come before the group's turn has
        acc += _load_bias(bias_ptr, col, N, WIDTH, EVEN_N, LAYOUT)[None, :]
    return acc


@gluon.jit
def _multiply(
    acc, x_ring, w_ring, full, empty, turn, i, steps,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, BACKWARD: gl.constexpr,
):  # fmt: skip
    """``acc`` plus the i-th tile; one step's products are under way while the next one waits."""
    mbarrier.wait(turn.index(GROUP), (i // GROUPS & 1) ^ (GROUP == 0))
    for k in range(steps):
        step = i * steps + k
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        if BACKWARD:
            w = w_ring.index(slot)
        else:
            w = w_ring.index(slot).slice(0, acc.shape[1]).permute((1, 0))
        flying = warpgroup_mma(x_ring.index(slot), w, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(flying,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
    mbarrier.arrive(turn.index((GROUP + 1) % GROUPS), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((i * steps + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _split(tile, PARTS: gl.constexpr):
    """Equal parts of a tile's columns, from left to right; each thread keeps what it holds."""
    if PARTS == 1:
        return (tile,)
    else:
        rows: gl.constexpr = tile.shape[0]
        half: gl.constexpr = tile.shape[1] // 2
        left, right = tile.reshape((rows, 2, half)).permute((0, 2, 1)).split()
        return _split(left, PARTS // 2) + _split(right, PARTS // 2)


@gluon.jit
def _widen(tile, LAYOUT: gl.constexpr):
    """A tile of twice the columns, the given one on its left; each thread keeps what it holds."""
    both = gl.join(tile, gl.zeros_like(tile)).permute((0, 2, 1))
    wide = both.reshape((tile.shape[0], 2 * tile.shape[1]))
    return gl.convert_layout(wide, LAYOUT, assert_trivial=True)


@gluon.jit
def _load_bias(bias_ptr, col, N, WIDTH: gl.constexpr, EVEN_N: gl.constexpr, LAYOUT: gl.constexpr):
    """The bias of columns ``[col, col + WIDTH)`` in fp32.

    Where tiles are whole nothing is compared: a mask of single columns made 390 of a tile's 1,300
    instructions, none of them a wide load. Elsewhere four columns are inside together (config.py).
    """
    k = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    if EVEN_N:
        return gl.load(bias_ptr + col + k).to(gl.float32)
    else:
        return gl.load(bias_ptr + col + k, mask=(col + k) // 4 < N // 4, other=0.0).to(gl.float32)


@gluon.jit
def _send(value, desc, at, staging):
    """Towards memory, through shared memory and the tensor copy engine, which clips at edges."""
    staging.store(value)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, at, staging)


@gluon.jit
def _finish_forward(
    acc, staging, sent, bias_ptr, pre_desc, out_desc, row, col, half, N,
    FIRST: gl.constexpr, CHUNKS: gl.constexpr, BUFFERS: gl.constexpr, ADD_BIAS: gl.constexpr,
    EVEN_N: gl.constexpr, GELU: gl.constexpr, KEEP_PRE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bias, unless the sums began with it, GELU and stores of one tile.

    Chunks take turns in the group's buffers; ``sent`` counts what the group has stored before.
    """
    parts = _split(acc, CHUNKS)
    for c in gl.static_range(CHUNKS):
        if 2 * c < CHUNKS or not half:
            sent = _finish_chunk(
                parts[c], staging, sent, bias_ptr, pre_desc, out_desc, row,
                col + c * out_desc.block_type.shape[1], N, FIRST, BUFFERS, ADD_BIAS, EVEN_N, GELU,
                KEEP_PRE, LAYOUT,
            )  # fmt: skip


@gluon.jit
def _finish_chunk(
    part, staging, sent, bias_ptr, pre_desc, out_desc, row, col, N,
    FIRST: gl.constexpr, BUFFERS: gl.constexpr, ADD_BIAS: gl.constexpr, EVEN_N: gl.constexpr,
    GELU: gl.constexpr, KEEP_PRE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bias, GELU and stores of one chunk of columns; returns what the group has stored by then."""
    dtype: gl.constexpr = out_desc.dtype
    y = gl.convert_layout(part, LAYOUT, assert_trivial=True)
    if ADD_BIAS:
        y += _load_bias(bias_ptr, col, N, out_desc.block_type.shape[1], EVEN_N, LAYOUT)[None, :]
    if KEEP_PRE:
        pre = y.to(dtype)
        tma.store_wait(BUFFERS - 1)  # the last store out of the same buffer
        _send(pre, pre_desc, [row, col], staging.index(FIRST + sent % BUFFERS))
        sent += 1
        y = pre.to(gl.float32)
    if GELU:
        y = gelu(y)
    tma.store_wait(BUFFERS - 1)
    _send(y.to(dtype), out_desc, [row, col], staging.index(FIRST + sent % BUFFERS))
    return sent + 1


@gluon.jit
def _store_sums(tile, at, columns, LAYOUT: gl.constexpr):
    """Sums over rows, half of the columns at a time: warps add them up through shared memory."""
    HALF: gl.constexpr = tile.shape[1] // 2
    halves = _split(tile, 2)
    for h in gl.static_range(2):
        part = gl.convert_layout(halves[h], LAYOUT, assert_trivial=True)
        k = h * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
        gl.store(at + k, gl.sum(part, 0), mask=k < columns)


@gluon.jit
def _finish_backward(
    acc, staging, out_desc, dpre_desc, partial_ptr, tile_m, row, col, N,
    FIRST: gl.constexpr, CHUNKS: gl.constexpr, NEED_ACT: gl.constexpr, NEED_SUMS: gl.constexpr,
    LAYOUT: gl.constexpr, HALF_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A chunk's ``dpre`` takes the place of ``pre``, its ``act`` that of the ``dpre`` before."""
    dtype: gl.constexpr = out_desc.dtype
    CHUNK: gl.constexpr = out_desc.block_type.shape[1]
    parts = _split(acc, CHUNKS)
    for c in gl.static_range(CHUNKS):
        at = [row, col + c * CHUNK]
        buffer = staging.index(FIRST + c)
        gelu_of_pre, slope = gelu_and_slope(buffer.load(LAYOUT).to(gl.float32))
        act = gelu_of_pre.to(dtype)
        dpre = gl.convert_layout(parts[c], LAYOUT, assert_trivial=True) * slope
        if NEED_SUMS:
            first = col + c * CHUNK
            sums = partial_ptr + tile_m.to(gl.int64) * N + first
            _store_sums(dpre, sums, N - first, HALF_LAYOUT)
        _send(dpre.to(dtype), dpre_desc, at, buffer)
        if NEED_ACT:
            tma.store_wait(
                2
            )  # of chunk c - 1: dpre has left, act and this dpre may be on their way
            _send(act, out_desc, at, staging.index(FIRST + (c - 1 if c else CHUNKS)))
    tma.store_wait(0)


@gluon.jit
def _consume_tiles(
    x_ring, w_ring, staging, full, empty, turn, staged, unstaged, bias_ptr, pre_desc, out_desc,
    dpre_desc, partial_ptr, count, rounds, steps, tiles_n, N,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, BIAS_FIRST: gl.constexpr, BACKWARD: gl.constexpr,
    HAS_BIAS: gl.constexpr, EVEN_N: gl.constexpr, GELU: gl.constexpr, KEEP_PRE: gl.constexpr,
    NEED_ACT: gl.constexpr, NEED_SUMS: gl.constexpr, LAYOUT: gl.constexpr,
    CHUNK_LAYOUT: gl.constexpr, HALF_LAYOUT: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """A warp group: products and epilogue of its tiles."""
    CHUNKS: gl.constexpr = BLOCK_N // out_desc.block_type.shape[1]
    FIRST: gl.constexpr = GROUP * BUFFERS
    HALF_N: gl.constexpr = BLOCK_N // 2
    HALF_TILE: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], LAYOUT.warps_per_cta, [16, HALF_N, LAYOUT.instr_shape[2]]
    )
    for i in range(GROUP, count, GROUPS):
        tile_m, col, half = _tile(i, rounds, tiles_n, BLOCK_N, HALVES)
        row = tile_m * BLOCK_M
        if HALVES and half:
            acc = _begin_sums(
                bias_ptr, col, N, BLOCK_M, HALF_N, HAS_BIAS and BIAS_FIRST, EVEN_N, HALF_TILE
            )
            acc = _multiply(
                acc, x_ring, w_ring, full, empty, turn, i, steps, GROUP, GROUPS, STAGES, BACKWARD
            )
            acc = _widen(acc, LAYOUT)
        else:
            acc = _begin_sums(
                bias_ptr, col, N, BLOCK_M, BLOCK_N, HAS_BIAS and BIAS_FIRST, EVEN_N, LAYOUT
            )
            acc = _multiply(
                acc, x_ring, w_ring, full, empty, turn, i, steps, GROUP, GROUPS, STAGES, BACKWARD
            )
        if BACKWARD:
            mbarrier.wait(staged.index(GROUP), i // GROUPS & 1)
            _finish_backward(
                acc, staging, out_desc, dpre_desc, partial_ptr, tile_m, row, col, N, FIRST, CHUNKS,
                NEED_ACT, NEED_SUMS, CHUNK_LAYOUT, HALF_LAYOUT,
            )  # fmt: skip
            mbarrier.arrive(unstaged.index(GROUP), count=1)
        else:
            sent = i // GROUPS * (2 * CHUNKS if KEEP_PRE else CHUNKS)
            _finish_forward(
                acc, staging, sent, bias_ptr, pre_desc, out_desc, row, col, half, N, FIRST, CHUNKS,
                BUFFERS, HAS_BIAS and not BIAS_FIRST, EVEN_N, GELU, KEEP_PRE, CHUNK_LAYOUT,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "K", "tiles", "tiles_n", "rounds"])
def _hopper_gemm_kernel(
    bias_ptr, x_desc, w_desc, pre_desc, out_desc, dpre_desc, partial_ptr, N, K, tiles, tiles_n,
    rounds,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUPS: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr, BUFFERS: gl.constexpr,
    BIAS_FIRST: gl.constexpr, BACKWARD: gl.constexpr, HAS_BIAS: gl.constexpr,
    EVEN_N: gl.constexpr, GELU: gl.constexpr, KEEP_PRE: gl.constexpr, NEED_ACT: gl.constexpr,
    NEED_SUMS: gl.constexpr, HALVES: gl.constexpr, PDL: gl.constexpr = False,
):  # fmt: skip
    """Two or three groups of ``WARPS`` multiply, the launch's own warps are the first of them, and
    one warp loads. Absent operands are None, but for bias_ptr. BUFFERS are chunks of staging per
    group: in the backward one more than chunks of a tile.
    """
    CHUNK: gl.constexpr = out_desc.block_type.shape[1]
    DEPTH: gl.constexpr = 32 * BLOCK_M * BLOCK_K // x_desc.block_type.nbytes
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, DEPTH])
    CHUNK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, DEPTH])
    HALF: gl.constexpr = CHUNK // 2
    HALF_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, DEPTH])
    count = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    steps = gl.cdiv(K, BLOCK_K)
    x_ring = buffers(x_desc, STAGES)
    w_ring = buffers(w_desc, STAGES)
    staging = buffers(out_desc, GROUPS * BUFFERS)
    full = _barriers(STAGES)
    empty = _barriers(STAGES)
    turn = _barriers(GROUPS)
    staged = _barriers(GROUPS)
    unstaged = _barriers(GROUPS)
    _start_barriers(full, empty, turn, staged, unstaged, STAGES, GROUPS, BACKWARD)
    gl.warp_specialize(
        [
            (_consume_tiles, (
                x_ring, w_ring, staging, full, empty, turn, staged, unstaged, bias_ptr, pre_desc,
                out_desc, dpre_desc, partial_ptr, count, rounds, steps, tiles_n, N, part, GROUPS,
                BLOCK_M, BLOCK_N, STAGES, BUFFERS, BIAS_FIRST, BACKWARD, HAS_BIAS, EVEN_N, GELU,
                KEEP_PRE, NEED_ACT, NEED_SUMS, LAYOUT, CHUNK_LAYOUT, HALF_LAYOUT, HALVES,
            ))
            if part < GROUPS else
            (_load_tiles, (
                x_desc, w_desc, pre_desc, x_ring, w_ring, staging, full, empty, staged, unstaged,
                count, rounds, steps, tiles_n, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUPS, BUFFERS,
                BACKWARD, HALVES, PDL,
            ))
            for part in ((0, 1, 2) if GROUPS == 2 else (0, 1, 2, 3))
        ],
        [WARPS, 1] if GROUPS == 2 else [WARPS, WARPS, 1],
        [REGISTERS, 24] if GROUPS == 2 else [REGISTERS, REGISTERS, 24],
    )  # fmt: skip

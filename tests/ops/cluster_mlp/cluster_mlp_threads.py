"""The MLP's kernel on a CPU (gluon_clusters.py): x and sums move where the generated PTX says."""

from __future__ import annotations

import functools

import torch
from gluon_clusters import expect_bytes, me
from gluon_memory import Barrier, Value
from ptx_reader import Copy, Group, Load
from ptx_reader import read as read_text

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.cluster_mlp import exchange


@functools.lru_cache
def read(text, threads, rank=0, **given):
    """What a text moves; operands are ``_number=value``, the same in all threads."""
    return read_text(text, threads, {int(n[1:]): value for n, value in given.items()}, rank)


def same(first, count, value):
    """So many operands of one value."""
    return {f"_{first + i}": int(value) for i in range(count)}


@functools.lru_cache
def tile_places(block_m, columns):
    """Row and column of each register of each thread as a product leaves a tile.

    Layout of ``wgmma``'s results and 16-bit first operands (PTX ISA, "Register Fragments and Shared
    Memory Matrix Layouts"): a warp has 16 rows.
    """
    layout = accumulator(columns, block_m)
    assert (list(layout.version), list(layout.warps_per_cta)) == ([3, 0], [block_m // 16, 1])
    assert list(layout.instr_shape[:2]) == [16, columns]
    thread, register = torch.arange(2 * block_m)[:, None], torch.arange(columns // 2)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    return row, column


@functools.lru_cache
def rows_places(block_m, programs):
    """Row and column of each register of each thread of a program's own rows."""
    layout = exchange.rows_layout(block_m, programs)
    assert list(layout.shape) == [block_m // programs, 128]
    thread = torch.arange(2 * block_m)[:, None]
    register = torch.arange(2 ** len(layout.reg_bases))
    place = torch.zeros(2 * block_m, len(register), 2, dtype=torch.long)
    for number, bases in (
        (register[None], layout.reg_bases), (thread % 32, layout.lane_bases),
        (thread // 32, layout.warp_bases),
    ):  # fmt: skip
        for bit, base in enumerate(bases):
            place ^= (number >> bit & 1)[..., None] * torch.tensor(base)
    assert len(layout.lane_bases) == 5
    assert 32 * 2 ** len(layout.warp_bases) == 2 * block_m
    return place[..., 0], place[..., 1]


def stage_rows(x_ptr, row0, M, address, C, BLOCK_M):
    thread = torch.arange(2 * BLOCK_M)
    row = int(row0) + thread // 32 * 16 + thread % 32 // 4
    given = {
        1: 2 * (row * C + thread % 4 * 8), 2: torch.where(row < M, 16, 0),
        3: torch.where(row + 8 < M, 16, 0), 4: int(address),
    }  # fmt: skip
    groups: list[list[Copy]] = [[]]
    for found in read_text(exchange._staging(BLOCK_M, C), 2 * BLOCK_M, given):
        if isinstance(found, Group):
            groups.append([])
        else:
            groups[-1].append(found)
    assert groups.pop() == []
    me().staged = [(x_ptr.base.view(torch.uint8), group) for group in groups]


def _land(outstanding):
    """Groups of copies arrive, as late as they may."""
    program = me()
    while len(program.staged) > outstanding:
        x, group = program.staged.pop(0)
        for copy in group:
            at = copy.address[:, None] - program.first + torch.arange(copy.size)
            source = copy.source[:, None] + torch.arange(copy.size)
            present = torch.arange(copy.size) < copy.present[:, None]
            found = torch.where(present, x[torch.where(present, source, 0)], 0)
            with program.lock:
                program.memory[at] = found


def take_rows(address, dtype, STEP, OUTSTANDING, BLOCK_M):
    return _operand(exchange._taking(BLOCK_M, STEP, OUTSTANDING), address, dtype, BLOCK_M)


def take_offset(address, dtype, STEP, BLOCK_M):
    return _operand(exchange._taking_offset(STEP), address, dtype, BLOCK_M)


def _operand(text, address, dtype, BLOCK_M):
    """64 columns as a first operand, where a text's loads leave them."""
    registers = torch.full((2 * BLOCK_M, 16), -1, dtype=torch.int32)
    for found in read(text, 2 * BLOCK_M, **same(16, 32, address)):
        if isinstance(found, Group):
            _land(found.outstanding)
        else:
            _take(found, registers)
    row, column = tile_places(BLOCK_M, 64)
    tile = torch.full((BLOCK_M, 64), float("nan"), dtype=dtype)
    tile[row, column] = registers.view(dtype)
    return tile.as_subclass(Value)


def _take(load: Load, registers):
    """Words of a program's own memory into registers."""
    program, size = me(), 4 * len(load.values)
    assert (load.address % size == 0).all()
    at = load.address[:, None] - program.first + torch.arange(size)
    with program.lock:
        registers[:, load.values] = program.memory[at].view(torch.int32)


def send_rows(sums, address, barrier, BLOCK_M, P):
    """Each warp's vectors for a program, which lie side by side, on a way of their own."""
    assert sums.element_size() == 2
    row, column = tile_places(BLOCK_M, 128)
    words = torch.Tensor(sums)[row, column].contiguous().view(torch.int32)
    given = same(48, 64, address) | same(112, 64, barrier)
    for store in read(exchange._sending(BLOCK_M, P), 2 * BLOCK_M, **given):
        assert (store.barrier == int(barrier)).all()
        assert (store.address % 16 == 0).all()
        values = words[:, [number - 16 for number in store.values]]
        for warp in range(BLOCK_M // 16):
            lanes = slice(32 * warp, 32 * warp + 32)
            program, to = store.program[lanes], store.address[lanes]
            for target in program.unique().tolist():
                some = program == target
                order = to[some].argsort()
                first = int(to[some][order[0]])
                assert (to[some][order] == first + 16 * torch.arange(len(order))).all()
                me().send(target, [(first, values[lanes][some][order])], barrier)


def receive_rows(address, dtype, BLOCK_M, P):
    values = 64 // P
    given = same(values // 2, values, address)
    registers = torch.full((2 * BLOCK_M, values // 2), -1, dtype=torch.int32)
    for found in read(exchange._receiving(BLOCK_M, P), 2 * BLOCK_M, **given):
        _take(found, registers)
    row, column = rows_places(BLOCK_M, P)
    tile = torch.full((BLOCK_M // P, 128), float("nan"), dtype=dtype)
    tile[row, column] = registers.view(dtype)
    return tile.as_subclass(Value)


def cluster_arrive_relaxed():
    me().cluster.arrive(me().rank)


def fetch_bytes(ptr, address, barrier, BYTES):
    data = ptr.base.view(torch.uint8)[:BYTES]
    me().flying.append(lambda: me().write(int(address), data, barrier))


def make_barriers(barriers, COUNT, NUMBER):
    for i in range(NUMBER):
        made = Barrier()
        made.count = made.pending = COUNT
        me().counters[int(barriers) + 8 * i] = made


def expect_bytes_of_each(barriers, BYTES, NUMBER):
    for i in range(NUMBER):
        expect_bytes(int(barriers) + 8 * i, BYTES)


def wait_arrivals(barrier, PARITY):
    me().counters[barrier].wait(PARITY)


def arrive_by_warp(warps, barrier):
    """Of the warps that multiply, which are one thread here."""
    me().counters[barrier].arrive(warps)


#: Stand-ins for ops/cluster_mlp/exchange.py and what the dialect alone has.
STEPS = {
    "stage_rows": stage_rows, "take_rows": take_rows, "take_offset": take_offset,
    "send_rows": send_rows, "receive_rows": receive_rows,
    "cluster_arrive_relaxed": cluster_arrive_relaxed, "fetch_bytes": fetch_bytes,
    "make_barriers": make_barriers, "expect_bytes_of_each": expect_bytes_of_each,
    "wait_arrivals": wait_arrivals,
    "computed_here": lambda values: values,
    "operand": lambda rows: None, "rows_layout": lambda *tile: None,
    "whole_rows": lambda *tile: None, "lanes_of_row": exchange.lanes_of_row,
    "_halves": lambda tile, layout: tile.chunk(2, 1),
}  # fmt: skip

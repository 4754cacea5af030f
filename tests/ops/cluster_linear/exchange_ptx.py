"""Reads the exchanges' generated PTX, all threads at once, and what of a tile each thread holds.

The text (ptx_reader.py) is what exchange.py and narrow_exchange.py of ops/cluster_linear hand to
the assembler. Tests say where memory lies (:func:`filled`) and what has been taken up of it
(:func:`taken_up`).
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from ptx_reader import Store, read

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.cluster_linear import exchange, narrow_exchange

#: Where a program's tail holds its barrier and, behind it, sums.
BARRIER, SUMS = 4096, 4096 + 128

#: What a word of memory or a register holds that nothing has been written to.
EMPTY = -1


def sent(block_m, block_n, splits, address, barrier, rank=0):
    """Stores of one program's whole tile; ``rank`` is its number in its cluster."""
    text = exchange._sending(block_m, block_n, splits)
    return _sent(text, 2 * block_m, block_n // 2, address, barrier, rank)


def sent_narrow(block_m, block_n, splits, address, barrier, rank=0):
    """As :func:`sent`, of a narrow tile."""
    text = narrow_exchange._sending(block_m, splits)
    return _sent(text, 2 * block_n, block_m // 2, address, barrier, rank)


def received(block_m, block_n, splits, address):
    """Loads of what one program has sent."""
    text = exchange._receiving(block_m, block_n, splits)
    return _received(text, 2 * block_m, block_n // 2 // splits, address)


def received_narrow(block_m, block_n, splits, address):
    """As :func:`received`, of a narrow tile."""
    rows = block_m // splits
    return _received(narrow_exchange._receiving(rows), 2 * block_n, rows // 2, address)


@functools.lru_cache(maxsize=4096)
def _sent(text, threads, values, address, barrier, rank):
    """Stores of so many sums a thread; operands are results, of no use, sums, places, barriers."""
    outputs = values // 4
    given = {outputs + values + i: address for i in range(values)}
    given |= {outputs + 2 * values + i: barrier for i in range(values)}
    return tuple(
        dataclasses.replace(store, values=[number - outputs for number in store.values])
        for store in read(text, threads, given, rank)
    )


@functools.lru_cache(maxsize=4096)
def _received(text, threads, values, address):
    return read(text, threads, {values + i: address for i in range(values)})


def words_at(addresses, size):
    """Numbers of consecutive words from each address on, ``[size, threads]``; vectors align."""
    assert (addresses % (4 * size) == 0).all()
    return (addresses - SUMS) // 4 + torch.arange(size)[:, None]


def filled(stores, places, programs, words, rank, first=0):
    """``[programs, words behind SUMS]``: of which place the sum is that has been stored there.

    ``places`` are the sums' own, by thread and register. The programs are numbers ``first`` and on
    of their cluster; number ``rank`` stores.
    """
    memory = torch.full((programs, words), EMPTY)
    for store in stores:
        at = words_at(store.address, len(store.values))[:, store.live]
        program = _target(store, rank)[store.live] - first
        assert (program >= 0).all()
        assert (memory[program, at] == EMPTY).all(), "two sums in one place"
        memory[program, at] = places[:, store.values].T[:, store.live]
    return memory


def counted(stores, programs, first=0):
    """Bytes that each program's barrier counts."""
    found = torch.zeros(programs, dtype=torch.long)
    for store in stores:
        if isinstance(store, Store):
            assert (store.barrier == BARRIER).all()
            program = store.program[store.live] - first
            assert ((program >= 0) & (program < programs)).all()
            found += 4 * len(store.values) * torch.bincount(program, minlength=programs)
    return found.tolist()


def _target(store, rank):
    """Whose memory a store goes to, by thread."""
    return store.program if isinstance(store, Store) else torch.full_like(store.address, rank)


def taken_up(loads, memory, registers):
    """What each of so many registers of each thread holds of a program's memory."""
    found = torch.full((len(loads[0].address), registers), EMPTY)
    for load in loads:
        assert (found[:, load.values] == EMPTY).all()
        found[:, load.values] = memory[words_at(load.address, len(load.values))].T
    return found


@functools.lru_cache
def tile_places(block_m, block_n):
    """Row and column of each register of each thread as a product leaves a tile.

    Layout of ``wgmma``'s results (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts"):
    a warp has 16 rows.
    """
    layout = accumulator(block_n, block_m)
    assert (list(layout.version), list(layout.warps_per_cta)) == ([3, 0], [block_m // 16, 1])
    assert list(layout.instr_shape[:2]) == [16, block_n]
    thread, register = torch.arange(2 * block_m)[:, None], torch.arange(block_n // 2)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    column = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    return row, column


def rows_places(block_m, block_n, splits):
    """Row and column of each register of each thread of a program's own rows."""
    layout = exchange.rows_layout(block_m, block_n, splits)
    assert list(layout.shape) == [block_m // splits, block_n]
    return _linear_places(*_bases(layout), 2 * block_m)


def turned_places(block_m, block_n):
    """Row and column of each register of each thread of a narrow tile, whose product is turned."""
    column, row = tile_places(block_n, block_m)
    return row, column


def narrow_places(block_m, block_n, splits):
    """As :func:`rows_places`, of a narrow tile's rows as they come."""
    layout = narrow_exchange._received_layout(block_m // splits, block_n)
    assert list(layout.shape) == [block_m // splits, block_n]
    return _linear_places(*_bases(layout), 2 * block_n)


def _bases(layout):
    """Of registers, lanes and warps; no two programs share a layout."""
    assert list(layout.block_bases) == []
    return [
        tuple(map(tuple, bases))
        for bases in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    ]


@functools.lru_cache
def _linear_places(registers, lanes, warps, threads):
    """What a linear layout's bases say."""
    thread = torch.arange(threads)[:, None]
    register = torch.arange(2 ** len(registers))
    place = torch.zeros(threads, len(register), 2, dtype=torch.long)
    for number, bases in (
        (register[None], registers), (thread % 32, lanes), (thread // 32, warps),
    ):  # fmt: skip
        for bit, base in enumerate(bases):
            place ^= (number >> bit & 1)[..., None] * torch.tensor(base)
    assert 2 ** len(lanes) == 32
    assert 32 * 2 ** len(warps) == threads
    return place[..., 0], place[..., 1]

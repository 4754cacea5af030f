"""Reads the exchanges' generated PTX, all threads at once, and what of a tile each thread holds.

The text is what exchange.py and narrow_exchange.py of ops/cluster_linear hand to the assembler: a
few instructions on registers, stores to another program's shared memory, loads from one's own. An
instruction or a name that is not known here is an error. Tests say where memory lies
(:func:`filled`) and what has been taken up of it (:func:`taken_up`).
"""

from __future__ import annotations

import dataclasses
import re

import torch

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.cluster_linear import exchange, narrow_exchange

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
MAPA = "mapa.shared::cluster.u32"

#: Where a program's tail holds its barrier and, behind it, sums.
BARRIER, SUMS = 4096, 4096 + 128

#: What a word of memory or a register holds that nothing has been written to.
EMPTY = -1


@dataclasses.dataclass(frozen=True)
class Store:
    """One ``st.async``: by thread the program and address it goes to, and the barrier it counts on.

    ``values`` are numbers of the thread's sums, in the order of their addresses.
    """

    program: torch.Tensor
    address: torch.Tensor
    barrier: torch.Tensor
    values: list[int]


@dataclasses.dataclass(frozen=True)
class Load:
    """One ``ld.shared``: by thread its address; ``values`` are numbers of what is found there."""

    address: torch.Tensor
    values: list[int]


@dataclasses.dataclass(frozen=True)
class Remote:
    """An address in another program, which ``mapa`` has made."""

    program: torch.Tensor
    address: torch.Tensor


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


def _sent(text, threads, values, address, barrier, rank):
    """Stores of so many sums a thread; operands are results, of no use, sums, places, barriers."""
    outputs = values // 4
    given = {outputs + values + i: address for i in range(values)}
    given |= {outputs + 2 * values + i: barrier for i in range(values)}
    return [
        dataclasses.replace(store, values=[number - outputs for number in store.values])
        for store in _read(text, threads, given, rank)
    ]


def _received(text, threads, values, address):
    return _read(text, threads, {values + i: address for i in range(values)})


def words_at(addresses, size):
    """Numbers of consecutive words from each address on, ``[size, threads]``; vectors align."""
    assert (addresses % (4 * size) == 0).all()
    return (addresses - SUMS) // 4 + torch.arange(size)[:, None]


def filled(stores, places, programs, words, first=0):
    """``[programs, words behind SUMS]``: of which place the sum is that has been stored there.

    ``places`` are the sums' own, by thread and register. The programs are numbers ``first`` and on
    of their cluster.
    """
    memory = torch.full((programs, words), EMPTY)
    for store in stores:
        assert (store.barrier == BARRIER).all()
        at, program = words_at(store.address, len(store.values)), store.program - first
        assert (program >= 0).all()
        assert (memory[program, at] == EMPTY).all(), "two sums in one place"
        memory[program, at] = places[:, store.values].T
    return memory


def taken_up(loads, memory, registers):
    """What each of so many registers of each thread holds of a program's memory."""
    found = torch.full((len(loads[0].address), registers), EMPTY)
    for load in loads:
        assert (found[:, load.values] == EMPTY).all()
        found[:, load.values] = memory[words_at(load.address, len(load.values))].T
    return found


def _read(text, threads, given, rank=0):
    """Stores and loads in order; ``given`` are operands by number, the same in all threads."""
    registers = {"%tid.x": torch.arange(threads)}
    registers["%cluster_ctarank"] = torch.full((threads,), rank)
    registers |= {f"${number}": torch.full((threads,), value) for number, value in given.items()}
    local, found = set(), []

    def value(name):
        return torch.full((threads,), int(name)) if name.isdigit() else registers[name]

    def at(bracketed):
        name, _, more = bracketed.strip("[]").partition("+")
        base = registers[name]
        if isinstance(base, Remote):
            return Remote(base.program, base.address + int(more or 0))
        return base + int(more or 0)

    begin, *lines, end = [line.strip() for line in re.split(r"[;]|(?<=^\{)", text)]
    assert (begin, end) == ("{", "}")
    for line in lines:
        name, rest = line.split(" ", 1)
        if name == ".reg":
            kind, names = rest.split(" ", 1)
            assert kind == ".b32"
            local |= set(names.split(", "))
            continue
        operands = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        if name.startswith(STORE) or name.startswith("ld.shared."):
            listed = next(o for o in operands if o.startswith("{")).strip("{}").split(", ")
            assert name in (f"{STORE}.v{len(listed)}.b32", f"ld.shared.v{len(listed)}.b32")
            numbers = [int(o.removeprefix("$")) for o in listed]
            if name.startswith("ld"):
                found.append(Load(at(operands[1]), numbers))
                continue
            to, counter = at(operands[0]), at(operands[2])
            assert torch.equal(to.program, counter.program)
            found.append(Store(to.program, to.address, counter.address, numbers))
            continue
        target, *inputs = operands
        assert target in local, f"{target} is no register of the text's own"
        registers[target] = _computed(name, [value(o) for o in inputs])
    return found


def _computed(name, inputs):
    one, *more = inputs
    if name == MAPA:
        return Remote(more[0], one)
    return {
        "mov.u32": lambda: one,
        "shr.u32": lambda: one >> more[0],
        "shl.b32": lambda: one << more[0],
        "and.b32": lambda: one & more[0],
        "add.u32": lambda: one + more[0],
        "rem.u32": lambda: one % more[0],
        "div.u32": lambda: one // more[0],
        "mad.lo.u32": lambda: one * more[0] + more[1],
    }[name]()


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
    return _linear_places(layout, 2 * block_m)


def turned_places(block_m, block_n):
    """Row and column of each register of each thread of a narrow tile, whose product is turned."""
    column, row = tile_places(block_n, block_m)
    return row, column


def narrow_places(block_m, block_n, splits):
    """As :func:`rows_places`, of a narrow tile's rows as they come."""
    layout = narrow_exchange._received_layout(block_m // splits, block_n)
    assert list(layout.shape) == [block_m // splits, block_n]
    return _linear_places(layout, 2 * block_n)


def _linear_places(layout, threads):
    """What a linear layout's bases say; no two programs share it."""
    thread = torch.arange(threads)[:, None]
    register = torch.arange(2 ** len(layout.reg_bases))
    place = torch.zeros(threads, len(register), 2, dtype=torch.long)
    for number, bases in (
        (register[None], layout.reg_bases), (thread % 32, layout.lane_bases),
        (thread // 32, layout.warp_bases),
    ):  # fmt: skip
        for bit, base in enumerate(bases):
            place ^= (number >> bit & 1)[..., None] * torch.tensor(base)
    assert 2 ** len(layout.lane_bases) == 32
    assert 32 * 2 ** len(layout.warp_bases) == threads
    assert list(layout.block_bases) == []
    return place[..., 0], place[..., 1]

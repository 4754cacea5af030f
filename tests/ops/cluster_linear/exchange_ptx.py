"""Reads the exchange's generated PTX, all threads at once, and what of a tile each thread holds.

The text is what ops/cluster_linear/exchange.py hands to the assembler: a few instructions on
registers, stores to another program's shared memory, loads from one's own. An instruction or a name
that is not known here is an error.
"""

from __future__ import annotations

import dataclasses
import re

import torch

from fastswin._triton.gluon_tiles import accumulator
from fastswin.ops.cluster_linear import exchange

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
MAPA = "mapa.shared::cluster.u32"


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
    values, outputs = block_n // 2, block_n // 8
    given = {outputs + values + i: address for i in range(values)}
    given |= {outputs + 2 * values + i: barrier for i in range(values)}
    return [
        dataclasses.replace(store, values=[number - outputs for number in store.values])
        for store in _read(text, 2 * block_m, given, rank)
    ]


def received(block_m, block_n, splits, address):
    """Loads of what one program has sent."""
    values = block_n // 2 // splits
    given = {values + i: address for i in range(values)}
    return _read(exchange._receiving(block_m, block_n, splits), 2 * block_m, given)


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
    thread = torch.arange(2 * block_m)[:, None]
    register = torch.arange(2 ** len(layout.reg_bases))
    place = torch.zeros(len(thread), len(register), 2, dtype=torch.long)
    for number, bases in (
        (register[None], layout.reg_bases), (thread % 32, layout.lane_bases),
        (thread // 32, layout.warp_bases),
    ):  # fmt: skip
        for bit, base in enumerate(bases):
            place ^= (number >> bit & 1)[..., None] * torch.tensor(base)
    assert 32 * 2 ** len(layout.warp_bases) == len(thread)
    assert list(layout.shape) == [block_m // splits, block_n]
    return place[..., 0], place[..., 1]

"""Reads inline PTX that moves values between programs, all threads at once.

A few instructions on registers, stores to another program's shared memory, loads from one's own,
copies from memory into it. An instruction or a name that is not known here is an error.
"""

from __future__ import annotations

import dataclasses
import re

import torch

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
MAPA = "mapa.shared::cluster.u32"
COPY = "cp.async.cg.shared.global"

#: What ends a group of copies, and what waits until so many groups are on their way at most.
GROUPS = ("cp.async.commit_group", "cp.async.wait_group")


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
class Group:
    """The end of a group of copies, or a wait that leaves the last ``outstanding`` on their way."""

    outstanding: int | None


@dataclasses.dataclass(frozen=True)
class Remote:
    """An address in another program, which ``mapa`` has made."""

    program: torch.Tensor
    address: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Copy:
    """One ``cp.async``: by thread where to and from, and how many of ``size`` bytes there are."""

    address: torch.Tensor
    source: torch.Tensor
    size: int
    present: torch.Tensor


def read(text, threads, given, rank=0):
    """What it moves, in order.

    ``given`` are operands by number: the same in all threads, or one each.
    """
    registers = {"%tid.x": torch.arange(threads)}
    registers["%cluster_ctarank"] = torch.full((threads,), rank)
    registers |= {
        f"${number}": torch.as_tensor(value).expand(threads) for number, value in given.items()
    }
    local, found = {"$0"}, []

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
        name, _, rest = line.partition(" ")
        if name in GROUPS:
            found.append(Group(int(rest) if rest else None))
            continue
        if name == ".reg":
            kind, names = rest.split(" ", 1)
            assert kind == ".b32"
            local |= set(names.split(", "))
            continue
        operands = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        if name == COPY:
            to, source, size, present = operands
            found.append(Copy(at(to), at(source), int(size), value(present)))
            continue
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
        "xor.b32": lambda: one ^ more[0],
        "add.u32": lambda: one + more[0],
        "rem.u32": lambda: one % more[0],
        "div.u32": lambda: one // more[0],
        "mad.lo.u32": lambda: one * more[0] + more[1],
    }[name]()

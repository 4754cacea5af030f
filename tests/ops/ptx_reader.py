"""Reads inline PTX that moves values between programs or asks for tiles, all threads at once.

A few instructions on registers and predicates, stores to shared memory of another program or of
one's own, loads from one's own, copies from memory into it. An instruction or a name that is not
known here is an error, and so is a result in a register of another kind.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import torch

STORE = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes"
MAPA = "mapa.shared::cluster.u32"
COPY = "cp.async.cg.shared.global"
TILE_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"

#: What of :data:`TILE_COPY` brings a tile to several programs.
TO_SEVERAL = ".multicast::cluster"

#: What ends a group of copies, and what waits until so many groups are on their way at most.
GROUPS = ("cp.async.commit_group", "cp.async.wait_group")

#: Registers by the type that an instruction ends in.
KINDS = {"u16": ".b16", "u32": ".b32", "s32": ".b32", "b32": ".b32", "u64": ".b64", "b64": ".b64"}


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """One ``st.async``: by thread the program and address it goes to, and the barrier it counts on.

    ``values`` are numbers of the thread's sums, in the order of their addresses; threads that are
    not ``live`` store nothing.
    """

    program: torch.Tensor
    address: torch.Tensor
    barrier: torch.Tensor
    values: list[int]
    live: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class OwnStore:
    """One ``st.shared``, to a program's own memory, which counts nowhere."""

    address: torch.Tensor
    values: list[int]
    live: torch.Tensor


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


@dataclasses.dataclass(frozen=True)
class TileCopy:
    """One tensor copy: by thread whether it asks, where to, for which tile, counted where.

    ``parameter`` is the descriptor's name; ``mask`` has a bit for each program that gets the tile,
    None where the thread's own does.
    """

    live: torch.Tensor
    address: torch.Tensor
    parameter: str
    column: torch.Tensor
    row: torch.Tensor
    barrier: torch.Tensor
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A kernel's parameter by name; its address is ``generic`` behind ``cvta``."""

    name: str
    generic: bool = False


@functools.lru_cache(maxsize=1024)
def _lines(text):
    """Predicate, name, operands and the rest of each line between the braces."""
    begin, *lines, end = [line.strip() for line in re.split(r"[;]|(?<=^\{)", text)]
    assert (begin, end) == ("{", "}")
    found = []
    for line in lines:
        predicate, name, rest = re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", line).groups()
        found.append((predicate, name, re.findall(r"\[[^]]*\]|\{[^}]*\}|[^\s,]+", rest), rest))
    return found


class Reader:
    """Registers of all threads, and what has been moved."""

    def __init__(self, threads, given, rank):
        self.threads, self.found, self.kinds = threads, [], {"$0": ".b32"}
        self.registers = {"%tid.x": torch.arange(threads)}
        self.registers["%cluster_ctarank"] = torch.full((threads,), rank)
        self.registers |= {
            f"${number}": torch.as_tensor(value).expand(threads) for number, value in given.items()
        }

    def value(self, name):
        if name.isdigit():
            return torch.full((self.threads,), int(name))
        return self.registers[name]

    def at(self, bracketed):
        name, _, more = bracketed.strip("[]").partition("+")
        base = self.registers[name]
        if isinstance(base, Remote):
            return Remote(base.program, base.address + int(more or 0))
        return base + int(more or 0)

    def live(self, predicate):
        if predicate is None:
            return torch.ones(self.threads, dtype=torch.bool)
        name = predicate.removeprefix("!")
        assert self.kinds[name] == ".pred"
        return ~self.registers[name] if name != predicate else self.registers[name]

    def line(self, predicate, name, operands, rest):
        if name.startswith(TILE_COPY):
            return self.found.append(self.tile(self.live(predicate), name, operands))
        if name.startswith((STORE, "st.shared.")):
            return self.found.append(self.store(self.live(predicate), name, operands))
        assert predicate is None, f"{name} of some threads"
        if name in GROUPS:
            self.found.append(Group(int(rest) if rest else None))
        elif name == ".reg":
            kind, *names = operands
            assert kind in (".pred", ".b16", ".b32", ".b64")
            self.kinds |= dict.fromkeys(names, kind)
        elif name == COPY:
            to, source, size, present = operands
            self.found.append(Copy(self.at(to), self.at(source), int(size), self.value(present)))
        elif name.startswith("ld.shared."):
            listed, address = operands
            self.found.append(Load(self.at(address), self.vector(name, "ld.shared", listed)))
        else:
            target, *inputs = operands
            assert target in self.kinds, f"{target} is no register of the text's own"
            kind = ".pred" if name.startswith("setp.") else KINDS[name.rsplit(".", 1)[-1]]
            if name.startswith("cvt."):
                kind = KINDS[name.split(".")[1]]
            assert self.kinds[target] == kind, f"{target} is no register for {name}"
            self.registers[target] = self.computed(name, inputs)

    def vector(self, name, begins, listed):
        """Numbers of operands that lie side by side."""
        numbers = [int(one.removeprefix("$")) for one in listed.strip("{}").split(", ")]
        assert name == f"{begins}.v{len(numbers)}.b32"
        return numbers

    def store(self, live, name, operands):
        if name.startswith("st.shared."):
            to, listed = operands
            return OwnStore(self.at(to), self.vector(name, "st.shared", listed), live)
        to, listed, counter = operands
        target, barrier = self.at(to), self.at(counter)
        assert torch.equal(target.program, barrier.program)
        values = self.vector(name, STORE, listed)
        return Store(target.program, target.address, barrier.address, values, live)

    def tile(self, live, name, operands):
        to, source, counter, *mask = operands
        assert name == TILE_COPY + (TO_SEVERAL if mask else "")
        of, column, row = re.fullmatch(r"\[(\S+), \{(\S+), (\S+)\}\]", source).groups()
        assert self.registers[of].generic, "a descriptor's address is generic"
        assert all(self.kinds[one] == ".b16" for one in mask)
        several = self.registers[mask[0]] if mask else None
        return TileCopy(
            live, self.at(to), self.registers[of].name, self.value(column), self.value(row),
            self.at(counter), several,
        )  # fmt: skip

    def computed(self, name, inputs):
        if name == "mov.b64":
            assert re.fullmatch(r"\w+_param_\d+", inputs[0]), "no parameter's name"
            return Parameter(inputs[0])
        one, *more = [self.value(operand) for operand in inputs]
        if name == "cvta.param.u64":
            return dataclasses.replace(one, generic=True)
        if name == MAPA:
            return Remote(more[0], one)
        return _COMPUTED[name](one, *more)


_COMPUTED = {
    "mov.u32": lambda a: a,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
    "rem.u32": lambda a, b: a % b,
    "div.u32": lambda a, b: a // b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.lt.u32": lambda a, b: a < b,
    "setp.lt.and.u32": lambda a, b, c: (a < b) & c,
}


def read(text, threads, given, rank=0):
    """What it moves, in order.

    ``given`` are operands by number: the same in all threads, or one each.
    """
    reader = Reader(threads, given, rank)
    for line in _lines(text):
        reader.line(*line)
    return reader.found

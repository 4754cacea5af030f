"""A Hopper's shared memory, barriers and copy engine on a CPU, for gluon_threads.py."""

from __future__ import annotations

import math
import threading
import types
from typing import Any

import torch

#: Longest wait for a barrier, seconds.
PATIENCE = 5.0

#: Columns of 16 bits that lie together where tiles are swizzled by 128 bytes.
SLAB = 64


class Barrier:
    """An mbarrier: a phase completes with its last arrival and its last byte."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = 0
        self.bytes = 0
        self.phase = 0

    def arrive(self, count: int, expected: int = 0) -> None:
        with self.changed:
            assert self.count, "a barrier that nobody initialised"
            self.bytes += expected
            self.pending -= count
            assert self.pending >= 0, "more arrivals than a phase has"
            self._settle()

    def landed(self, size: int) -> None:
        with self.changed:
            self.bytes -= size
            self._settle()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE), "hangs"

    def _settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.changed.notify_all()


class Value(torch.Tensor):
    """Registers: a value of the dialect, which ``+=`` leaves as it is for whoever holds it."""

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


class Shared:
    """Buffers of shared memory; barriers where the elements are int64."""

    def __init__(self, dtype: Any, shape: list[int], items: list[Any] | None = None) -> None:
        self.shape = shape
        if items is not None:
            self.items = items
        elif dtype is torch.int64:
            self.items = [Barrier() for _ in range(shape[0])]
        else:
            self.items = [Tile(torch.full(shape[1:], float("nan"), dtype=dtype))
                          for _ in range(shape[0])]  # fmt: skip

    def index(self, i: Any) -> Any:
        return self.items[int(i)]

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """The same 16-bit values as smaller tiles: rows of these, or 64 of their columns.

        Up to 64 columns a tile lies row by row. More lie in slabs of 64, one behind the other.
        """
        (_, rows, columns), (count, height, width) = self.shape, shape
        assert self.items[0].data.dtype == dtype
        assert dtype.itemsize == 2
        assert min(columns, SLAB) == width
        assert rows % height == 0
        parts = [
            tile.data[first : first + height, left : left + width]
            for tile in self.items
            for left in range(0, columns, width)
            for first in range(0, rows, height)
        ]
        assert len(parts) == count
        return Shared(dtype, shape, [Tile(part) for part in parts])


class Tile:
    """One buffer."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def permute(self, order: tuple[int, int]) -> Tile:
        return Tile(self.data.permute(order))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """The same memory as smaller tiles, one behind the other; within them places differ."""
        assert self.data.dtype == dtype
        return Shared(dtype, shape, [Tile(part) for part in self.data.view(shape)])

    def slice(self, start: int, length: int) -> Tile:
        return Tile(self.data[start : start + length])

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone().as_subclass(Value)

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape
        self.data.copy_(value)


class Ring:
    """The one buffer of a kernel that knows where it lies, and barriers that count its tiles.

    Kept as bytes where addresses say, from before the program allocates it: others may fill it
    already. What nobody has written is NaN.
    """

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.size = 0
        self.barriers: dict[int, Barrier] = {}
        self.lock = threading.Lock()

    def of_size(self, size: int) -> torch.Tensor:
        """All of it, made when it is first seen."""
        with self.lock:
            if not len(self.memory):
                self.memory = torch.full((size,), 255, dtype=torch.uint8)
            assert len(self.memory) == size
            return self.memory

    def allocate(self, dtype: Any, shape: list[int]) -> Shared:
        assert self.size == 0, "one buffer lies where shared memory begins, no second one"
        self.size = math.prod(shape) * dtype.itemsize
        assert self.first + self.size <= self.end, "a ring that reaches into the tail"
        values = self.of_size(self.size).view(dtype).view(shape)
        return Shared(dtype, shape, [Tile(part) for part in values])

    def expect(self, barrier: int, size: int) -> None:
        """Make a barrier, for tiles of so many bytes in its first phase."""
        assert barrier not in self.barriers
        made = self.barriers[barrier] = Barrier()
        made.count = made.pending = 1
        made.arrive(1, size)

    def land(self, address: int, tile: torch.Tensor, barrier: int, size: int) -> None:
        """A tile of rows one behind the other, into a ring of so many bytes."""
        data = tile.contiguous().view(torch.uint8).flatten()
        start = address - self.first
        assert 0 <= start <= size - len(data)
        self.of_size(size)[start : start + len(data)] = data
        self.barriers[barrier].landed(len(data))

    def settled(self) -> None:
        for barrier in self.barriers.values():
            assert (barrier.pending, barrier.bytes) == (1, 0), "tiles that nobody has waited for"


class Descriptor:
    """Tiles of a matrix; reads beyond its edges give 0, writes are dropped."""

    def __init__(self, base: torch.Tensor, block: list[int]) -> None:
        self.base, self.dtype, self.layout = base, base.dtype, None
        nbytes = block[0] * block[1] * base.element_size()
        self.block_type = types.SimpleNamespace(shape=block, nbytes=nbytes)

    def read(self, at: list[Any]) -> torch.Tensor:
        rows, columns = self.block_type.shape
        tile = torch.zeros(rows, columns, dtype=self.dtype)
        part = self.base[int(at[0]) : int(at[0]) + rows, int(at[1]) : int(at[1]) + columns]
        tile[: part.shape[0], : part.shape[1]] = part
        return tile

    def write(self, at: list[Any], tile: torch.Tensor) -> None:
        rows, columns = self.block_type.shape
        part = self.base[int(at[0]) : int(at[0]) + rows, int(at[1]) : int(at[1]) + columns]
        part.copy_(tile[: part.shape[0], : part.shape[1]])


class Pointer:
    """Address into a flat tensor, alone or with a vector of offsets."""

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + more)

"""Clusters on a CPU: the programs of one are threads that write into each other's memory.

Stand-ins for _triton/cluster_memory.py and ops/swin_block/exchange.py. Each program has its own
tail, kept as bytes where the kernel's addresses say, so a place that is written twice loses what it
held. What is sent lands at once or, by chance, when its program next waits for bytes, in any order;
a barrier counts it as it lands. What threads without a row would read is NaN. Without a tail a
cluster is one program. Partitions of a program arrive at the cluster's barrier each for itself.
A kernel's ring of tiles (gluon_memory.py) lies where shared memory begins.
"""

from __future__ import annotations

import contextvars
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from gluon_memory import PATIENCE, Barrier, Descriptor, Pointer, Ring, Value
from gluon_threads import bound_source, settled

#: Where a program's shared memory begins, and ends: where aligning a tail costs 127 bytes of it.
BEGIN, END = 1024, 233472 + 1

_thread = torch.arange(128)
_register = torch.arange(16)

#: Row and column of each of a thread's 16 values of a [64, 32] tile, ``[128, 16]``.
ROW = (_thread // 32 * 16 + _thread % 32 // 4)[:, None] + _register % 4 // 2 * 8
COLUMN = (_thread % 4 * 2)[:, None] + _register // 4 * 8 + _register % 2


class Program:
    """One of a cluster's: its number, its memory, and what it has sent that has not landed.

    ``unseen`` are stores to its own memory that its warps do not see yet, ``apart`` says that they
    may be at different places.
    """

    def __init__(self, cluster: Cluster, rank: int, number: int, tail_bytes: int) -> None:
        self.cluster, self.rank, self.number = cluster, rank, number
        self.first = (END - tail_bytes + 127) // 128 * 128
        self.memory = torch.full((max(END - self.first, 0),), 255, dtype=torch.uint8)
        self.ring = Ring(BEGIN, self.first)
        self.barriers: dict[int, Barrier] = {}
        self.counters: dict[int, Barrier] = {}
        self.expected: dict[int, int] = {}
        self.lock = threading.Lock()
        self.flying: list[Callable[[], None]] = []
        self.unseen: list[Callable[[], None]] = []
        self.apart = False
        self.ended = False

    def read(self, address: int, size: int) -> torch.Tensor:
        start = address - self.first
        assert 0 <= start <= len(self.memory) - size, "a read outside of the tail"
        with self.lock:
            return self.memory[start : start + size].clone()

    def write(self, address: int, values: torch.Tensor, barrier: int) -> None:
        """16-bit or 32-bit values to an address; their bytes count on a barrier."""
        assert not self.ended, "a store to a program that has ended"
        assert barrier in self.barriers, "a store before its barrier is made"
        self.barriers[barrier].landed(self.put(address, values))

    def put(self, address: int, values: torch.Tensor) -> int:
        """:meth:`write` that counts nowhere; the values' bytes."""
        data = values.contiguous().view(torch.uint8).flatten()
        start = address - self.first
        assert 0 <= start <= len(self.memory) - len(data), "a store outside of the tail"
        made = (*self.barriers, *self.counters, *self.ring.barriers)
        assert not any(address - 8 < b < address + len(data) for b in made), (
            "a store over a barrier"
        )
        with self.lock:
            self.memory[start : start + len(data)] = data
        return len(data)

    def send(self, rank: int, parts: list[tuple[int, torch.Tensor]], barrier: int) -> None:
        """Addresses and what goes there, each part at its own time."""
        target = self.cluster.programs[rank]
        for address, values in parts:
            self.flying.append(lambda a=address, v=values: target.write(a, v, barrier))
        if random.random() < 0.5:
            self.land()

    def lacks_its_own_only(self, barrier: int) -> bool:
        """Whether a barrier, filled by all programs alike, waits for no other program."""
        missing = self.barriers[barrier].bytes * len(self.cluster.programs)
        return missing <= self.expected[barrier]

    def land(self) -> None:
        """What has been sent arrives."""
        self.land_until(lambda: False)

    def land_until(self, enough: Callable[[], bool]) -> None:
        """What has been sent arrives, some of it where that is enough."""
        random.shuffle(self.flying)
        while self.flying and not enough():
            self.flying.pop()()

    def end(self) -> None:
        self.land()
        self.ended = True
        settled()
        for barrier in self.barriers.values():
            assert (barrier.phase, barrier.bytes) == (1, 0), "bytes that nobody has waited for"
        self.ring.settled()


class Cluster:
    """Programs that meet at a barrier of their own."""

    def __init__(self, number: int, size: int, tail_bytes: int, partitions: int = 1) -> None:
        self.programs = [Program(self, i, number * size + i, tail_bytes) for i in range(size)]
        self.changed = threading.Condition()
        self.arrived = 0
        self.arrivals = [0] * size
        self.everyone = size * partitions
        self.phases: dict[int, int] = {}
        self.waited: dict[int, int] = {}
        self.failures: list[BaseException] = []

    def arrive(self, rank: int) -> None:
        thread = threading.get_ident()
        with self.changed:
            phase = self.phases.get(thread, 0)
            assert self.waited.get(thread, 0) == phase, "an arrival before the last was waited for"
            self.phases[thread] = phase + 1
            self.arrived += 1
            self.arrivals[rank] += 1
            self.changed.notify_all()

    def pass_by(self) -> int:
        """Go on without waiting; the phase that nobody has waited for."""
        thread = threading.get_ident()
        phase = self.waited[thread] = self.phases[thread]
        return phase

    def wait(self, rank: int) -> None:
        phase = self.pass_by()
        with self.changed:
            assert self.changed.wait_for(lambda: self.arrived >= self.everyone * phase, PATIENCE), (
                "the cluster's barrier hangs"
            )


_here: contextvars.ContextVar[Program] = contextvars.ContextVar("program")


def me() -> Program:
    """The program that the calling thread runs, or runs a partition of."""
    return _here.get()


def _pieces(value: torch.Tensor, address: Any, threads: int) -> list[tuple[int, torch.Tensor]]:
    """A tile as its threads store it, 16 bytes each at a time."""
    registers = value[ROW, COLUMN].view(128, -1, 16 // value.element_size())
    at = int(address)
    return [(at + 16 * threads * i, registers[:threads, i]) for i in range(registers.shape[1])]


def _tile(address: Any, dtype: torch.dtype, threads: int) -> torch.Tensor:
    """What :func:`_pieces` has left; NaN in rows of no thread."""
    words = []
    for i in range(dtype.itemsize):
        found = me().read(int(address) + 16 * threads * i, 16 * 128)
        words.append(found.view(dtype).view(128, -1))
    registers = torch.cat(words, 1)
    registers[threads:] = float("nan")
    tile = torch.empty(64, 32, dtype=dtype)
    tile[ROW, COLUMN] = registers
    return tile.as_subclass(Value)


def tail_address(TAIL: int) -> int:
    return me().first


def cluster_arrive() -> None:
    me().cluster.arrive(me().rank)


def cluster_wait() -> None:
    me().cluster.wait(me().rank)


def expect_bytes(barrier: int, BYTES: int) -> None:
    assert barrier not in me().barriers
    made = Barrier()
    made.count = made.pending = 1
    made.arrive(1, BYTES)
    me().expected[barrier] = BYTES
    me().barriers[barrier] = made


def expect_bytes_late(barrier: int, BYTES: int) -> None:
    """:func:`expect_bytes` where program 1 makes its barriers after others have begun."""
    deadline = time.monotonic() + PATIENCE / 2
    while me().rank == 1 and not me().cluster.failures and time.monotonic() < deadline:
        time.sleep(1e-3)
    expect_bytes(barrier, BYTES)


def wait_bytes(barrier: int) -> None:
    me().land()
    me().barriers[barrier].wait(0)


def send_piece(piece: torch.Tensor, address: Any, barrier: int, rank: Any, THREADS: int) -> None:
    assert piece.element_size() == 2
    me().send(int(rank), _pieces(piece, address, THREADS), barrier)


def receive_piece(address: Any, dtype: torch.dtype, THREADS: int, LAYOUT: Any) -> torch.Tensor:
    return _tile(address, dtype, THREADS)


def send_sums(piece: torch.Tensor, address: Any, barrier: int, rank: Any, THREADS: int) -> None:
    assert piece.element_size() == 4
    me().send(int(rank), _pieces(piece, address, THREADS), barrier)


def receive_sums(address: Any, THREADS: int, LAYOUT: Any) -> torch.Tensor:
    return _tile(address, torch.float32, THREADS)


def send_statistics(
    mean: torch.Tensor, deviations: torch.Tensor, address: Any, barrier: int, rank: Any,
    row: torch.Tensor, ROWS: int, WARPS: int = 1,
) -> None:  # fmt: skip
    both = torch.stack((mean, deviations), 1)[row < ROWS]
    me().send(int(rank), [(int(address), both)], barrier)


def spread_statistics(
    mean: torch.Tensor, rstd: torch.Tensor, address: Any, barrier: int, row: torch.Tensor,
    LANES: int, PROGRAMS: int,
) -> None:  # fmt: skip
    assert LANES >= PROGRAMS == len(me().cluster.programs)
    both = torch.stack((mean, rstd), 1)
    for rank in range(PROGRAMS):
        me().send(rank, [(int(address) + 8 * int(row[0]), both)], barrier)


def receive_statistics(address: Any, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = me().read(int(address), 8 * len(row)).view(torch.float32).view(-1, 2)
    return both[:, 0].as_subclass(Value), both[:, 1].as_subclass(Value)


STEPS = (
    cluster_arrive, cluster_wait, expect_bytes, wait_bytes, send_piece, receive_piece, send_sums,
    receive_sums, send_statistics, receive_statistics, spread_statistics,
)  # fmt: skip


def run_clusters(
    module: Any, kernel: str, clusters: int, size: int, tail_bytes: int, arguments: tuple,
    constants: dict[str, Any], partitions: int = 1, dialect: dict[str, Any] | None = None,
    **stand_ins: Any,
) -> None:  # fmt: skip
    """Run a Gluon kernel cluster by cluster, as _triton/cluster.py launches it.

    Args:
        module: where the kernel and what it calls are defined.
        kernel: its name.
        clusters, size, tail_bytes: of the launch.
        arguments: tensors, descriptors and numbers, in order.
        constants: compile-time parameters.
        partitions: of a program.
        dialect: see :func:`bound_source`.
        stand_ins: other functions in the place of this module's.
    """
    steps = {step.__name__: step for step in STEPS}
    body = bound_source(
        module, kernel, lambda axis: torch.tensor(me().number, dtype=torch.int32),
        clusters * size, dialect, **{"tail_address": tail_address} | steps | stand_ins,
    )  # fmt: skip
    taken = [
        a if isinstance(a, Descriptor) or not isinstance(a, torch.Tensor) else Pointer(a.view(-1))
        for a in arguments
    ]
    for number in range(clusters):
        _run(Cluster(number, size, tail_bytes, partitions), lambda: body(*taken, **constants))


def _run(cluster: Cluster, body: Callable[[], None]) -> None:
    """All programs of a cluster side by side; the first failure is raised."""

    def run(program: Program) -> None:
        _here.set(program)
        try:
            body()
            program.end()
        except BaseException as error:  # reported by the thread that waits
            cluster.failures.append(error)

    threads = [threading.Thread(target=run, args=(p,), daemon=True) for p in cluster.programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * PATIENCE)
    if cluster.failures:
        raise cluster.failures[0]
    assert not any(thread.is_alive() for thread in threads), "hangs"

"""The ring of tiles on a CPU: which warp asks for what is read from the generated PTX.

The sources of ``ask_for_tiles`` and ``ask_again`` are executed and their text read for all threads
of a program (ptx_reader.py). A tile may land as soon as it is asked for, or late, in any order, in
the memory of every program that the mask names. Warps of a program are apart from each other from a
wait or the making of a barrier until they meet; what they ask for then others may not be ready for.
"""

from __future__ import annotations

import random

import gluon_clusters
from gluon_clusters import me
from gluon_memory import Descriptor
from gluon_threads import bound_source
from ptx_reader import read

from fastswin._triton import tile_copies


def parameters(kernel, arguments):
    """Descriptors by the names that a kernel's parameters have in PTX: each is five of them."""
    found, number = {}, 0
    for argument in arguments:
        if isinstance(argument, Descriptor):
            found[f"{kernel}_param_{number}"] = argument
        number += 5 if isinstance(argument, Descriptor) else 1
    return found


def ring_address():
    return me().ring.first


def expect_bytes_of_each(barriers, BYTES, NUMBER):
    for i in range(NUMBER):
        at = int(barriers) + 8 * i
        assert me().first <= at <= gluon_clusters.END - 8, "a barrier outside of the tail"
        me().ring.expect(at, BYTES)
    me().apart = True


def expect_more_bytes(barrier, BYTES):
    me().ring.barriers[int(barrier)].arrive(1, BYTES)


def wait_arrivals(barrier, PARITY):
    """What the program has asked for itself lands as late as it may."""
    made = me().ring.barriers[int(barrier)]
    me().land_until(lambda: made.phase % 2 != PARITY)
    made.wait(PARITY)
    me().apart = True


def debug_barrier():
    """Warps of a program meet; each sees what the others have stored."""
    me().apart = False
    for store in me().unseen:
        store()
    me().unseen.clear()


def cluster_wait():
    gluon_clusters.cluster_wait()
    me().apart = False


def keep(address, values):
    """A store to a program's own memory, which other threads see by chance, or when they meet."""
    me().unseen.append(lambda: me().put(address, values))
    if random.random() < 0.5:
        me().unseen.pop()()


class Asking:
    """Takes up a program's inline assembly that asks for tiles.

    Args:
        kernel, arguments: of the launch.
        threads: of a program.
        size: bytes of the ring.
    """

    def __init__(self, kernel, arguments, threads, size):
        self.descriptors, self.threads = parameters(kernel, arguments), threads
        self.size = size

    def dialect(self):
        """What of the dialect the ring needs."""
        return {
            "allocate_shared_memory": self.allocate, "debug_barrier": debug_barrier,
            "inline_asm_elementwise": self.assembly,
        }  # fmt: skip

    def allocate(self, dtype, shape, layout):
        made = me().ring.allocate(dtype, shape)
        assert me().ring.size == self.size, "a ring of another size than the launch says"
        return made

    def function(self, name, **stand_ins):
        """``ask_for_tiles`` or ``ask_again`` itself."""
        return bound_source(tile_copies, name, lambda axis: None, 0, self.dialect(), **stand_ins)

    def assembly(self, text, constraints, operands, dtype, is_pure, pack):
        assert constraints == "=r," + "r," * len(operands) + "~{memory}"
        assert (is_pure, pack) == (False, 1)
        assert not me().apart, "asked for before all warps know what the others have done"
        given = {1 + number: int(operand) for number, operand in enumerate(operands)}
        for copy in read(text, self.threads, given, me().rank):
            for thread in copy.live.nonzero().flatten().tolist():
                several = None if copy.mask is None else int(copy.mask[thread])
                at = [int(copy.row[thread]), int(copy.column[thread])]
                ask(self.descriptors[copy.parameter], at, int(copy.address[thread]),
                    int(copy.barrier[thread]), several)  # fmt: skip


def ask(desc, at, address, barrier, mask):
    """One tile for this program, or for each that the mask names."""
    program = me()
    programs = program.cluster.programs
    mask = 1 << program.rank if mask is None else mask
    assert 0 < mask < 1 << len(programs), "a tile for programs that the cluster lacks"
    ring = program.ring
    assert address % 1024 == 0, "a tile that lies askew"
    end = ring.first + ring.size - desc.block_type.nbytes
    assert ring.first <= address <= end, "a tile over the ring's end"

    def land(target):
        assert not target.ended, "a tile for a program that has ended"
        target.ring.land(address, desc.read(at), barrier, ring.size)

    for target in programs:
        if mask >> target.rank & 1:
            assert barrier in target.ring.barriers, "a tile before its barrier is made"
            program.flying.append(lambda target=target: land(target))
    if random.random() < 0.3:
        program.land()


STEPS = {
    "ring_address": ring_address, "expect_bytes_of_each": expect_bytes_of_each,
    "expect_more_bytes": expect_more_bytes, "wait_arrivals": wait_arrivals,
    "cluster_wait": cluster_wait,
}  # fmt: skip

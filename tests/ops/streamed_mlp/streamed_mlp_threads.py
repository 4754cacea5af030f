"""The streamed MLP's exchange on a CPU (gluon_clusters.py): sums move where the PTX says."""

from __future__ import annotations

import random
import time

import torch
from gluon_clusters import me
from gluon_memory import Value
from ptx_reader import read

from fastswin.ops.streamed_mlp import exchange

#: Row and column of each register of each of a group's threads: ``wgmma``'s results of 64 columns
#: (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts").
_thread, _register = torch.arange(128)[:, None], torch.arange(32)
ROW = 16 * (_thread // 32) + _thread % 32 // 4 + 8 * (_register // 2 % 2)
COLUMN = 8 * (_register // 4) + 2 * (_thread % 4) + _register % 2


def same(first, value):
    """32 operands of one value, as a scalar beside a tile has them."""
    return {first + i: int(value) for i in range(32)}


def send_part(sums, address, barrier, rank):
    assert sums.element_size() == 2
    words = torch.Tensor(sums)[ROW, COLUMN].contiguous().view(torch.int32)
    given = same(24, address) | same(56, barrier) | same(88, rank)
    for store in read(exchange._sending(), 128, given):
        assert (store.program == int(rank)).all()
        assert (store.barrier == int(barrier)).all()
        values = words[:, [number - 8 for number in store.values]]
        order = store.address.argsort()
        assert (store.address[order].diff() == 16).all()
        to = me().cluster.programs[int(rank)]
        time.sleep(random.random() * 1e-3)
        to.write(int(store.address[order[0]]), values[order], barrier)


def wait_bytes(barrier):
    """The group that waits is not the one that sends, which lets its sums land itself."""
    me().barriers[barrier].wait(0)


def receive_part(address, dtype):
    registers = torch.full((128, 16), -1, dtype=torch.int32)
    for load in read(exchange._receiving(), 128, same(16, address)):
        assert (load.address % 16 == 0).all()
        at = load.address[:, None] - me().first + torch.arange(16)
        with me().lock:
            registers[:, load.values] = me().memory[at].view(torch.int32)
    tile = torch.full((64, 64), float("nan"), dtype=dtype)
    tile[ROW, COLUMN] = registers.view(dtype)
    return tile.as_subclass(Value)


STEPS = {
    "wait_bytes": wait_bytes, "send_part": send_part, "receive_part": receive_part,
    "cluster_arrive_relaxed": lambda: me().cluster.arrive(me().rank),
    "row_layout": lambda: None, "_power_of_2": lambda count: 1 << (count - 1).bit_length(),
}  # fmt: skip

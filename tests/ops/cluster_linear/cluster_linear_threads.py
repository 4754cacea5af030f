"""The product's kernel on a CPU (gluon_clusters.py): what its programs send each other.

Vectors go where the generated PTX says (exchange_ptx.py).
"""

from __future__ import annotations

import time

import torch
from exchange_ptx import received, rows_places, sent, tile_places
from gluon_clusters import me
from gluon_memory import PATIENCE, Value

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, ring_slots


def config_of(block_m, block_n, splits, K, slots=None):
    """Tiles with a ring of so many slots, None for as many as there are steps or fit."""
    slots = ring_slots(block_m, block_n, splits, K) if slots is None else slots
    return ClusterLinearConfig(block_m, block_n, splits, slots)


def send_rows(sums, address, barrier, BLOCK_M, BLOCK_N, SPLITS):
    """Each warp's vectors of one store, which lie side by side, on a way of their own."""
    row, column = tile_places(BLOCK_M, BLOCK_N)
    registers = torch.Tensor(sums)[row, column]
    for store in sent(BLOCK_M, BLOCK_N, SPLITS, int(address), int(barrier), me().rank):
        assert (store.barrier == int(barrier)).all()
        program, to = store.program.view(-1, 32), store.address.view(-1, 32)
        assert (program == program[:, :1]).all()
        assert (to == to[:, :1] + 4 * len(store.values) * torch.arange(32)).all()
        for warp, values in enumerate(registers[:, store.values].split(32)):
            me().send(int(program[warp, 0]), [(int(to[warp, 0]), values)], int(barrier))


def receive_rows(address, BLOCK_M, BLOCK_N, SPLITS):
    row, column = rows_places(BLOCK_M, BLOCK_N, SPLITS)
    registers = torch.full(row.shape, float("nan"))
    memory = me().read(me().first, len(me().memory)).view(torch.uint8)
    for load in received(BLOCK_M, BLOCK_N, SPLITS, int(address)):
        size = 4 * len(load.values)
        at = load.address[:, None] - me().first + torch.arange(size)
        registers[:, load.values] = memory[at].view(torch.float32)
    tile = torch.full((BLOCK_M // SPLITS, BLOCK_N), float("nan"))
    tile[row, column] = registers
    return tile.as_subclass(Value)


#: Stand-ins for what _triton/cluster_memory.py lacks.
STEPS = {"send_rows": send_rows, "receive_rows": receive_rows, "rows_layout": lambda *tile: None}


def until_the_first_has_ended():
    """Hold the calling program back, for half of what the others wait at most."""
    deadline = time.monotonic() + PATIENCE / 2
    while not me().cluster.programs[0].ended and time.monotonic() < deadline:
        time.sleep(1e-3)

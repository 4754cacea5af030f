"""The product's kernel on a CPU (gluon_clusters.py): what its programs send each other.

Vectors go where the generated PTX says (exchange_ptx.py).
"""

from __future__ import annotations

import functools
import time

import ring_threads
import torch
from exchange_ptx import (
    narrow_places,
    received,
    received_narrow,
    rows_places,
    sent,
    sent_narrow,
    tile_places,
)
from gluon_clusters import me
from gluon_memory import PATIENCE, Value
from ptx_reader import OwnStore
from ring_threads import keep

from fastswin.ops.cluster_linear.config import ClusterLinearConfig, ring_slots


def config_of(block_m, block_n, splits, K, slots=None, block_k=64, shares=(1, 1)):
    """Tiles with a ring of so many slots, None for as many as there are steps or fit."""
    if slots is None:
        slots = ring_slots(block_m, block_n, splits, K, block_k=block_k)
    return ClusterLinearConfig(block_m, block_n, splits, slots, block_k, *shares)


def send_rows(sums, address, barrier, BLOCK_M, BLOCK_N, SPLITS):
    row, column = tile_places(BLOCK_M, BLOCK_N)
    stores = sent(BLOCK_M, BLOCK_N, SPLITS, int(address), int(barrier), me().rank)
    _send(torch.Tensor(sums)[row, column], stores, int(barrier))


def send_narrow(sums, address, barrier, BLOCK_M, SPLITS):
    """The product lies the other way round: its rows are features."""
    BLOCK_N = len(sums)
    feature, row = tile_places(BLOCK_N, BLOCK_M)
    stores = sent_narrow(BLOCK_M, BLOCK_N, SPLITS, int(address), int(barrier), me().rank)
    _send(torch.Tensor(sums)[feature, row], stores, int(barrier))


def _send(registers, stores, barrier):
    """Each warp's vectors of one store on a way of their own.

    Those for the program itself are stored where its other threads see them (ring_threads.py).
    """
    for store in stores:
        values = registers[:, store.values].split(32)
        for warp, program, to in _ways(store, barrier):
            if program is None:
                keep(to, values[warp])
            else:
                me().send(program, [(to, values[warp])], barrier)


@functools.lru_cache(maxsize=4096)
def _ways(store, barrier):
    """Warps whose vectors, side by side, go to another program or (None) stay; their addresses."""
    to, live = store.address.view(-1, 32), store.live.view(-1, 32)
    assert (live == live[:, :1]).all()
    assert (to == to[:, :1] + 4 * len(store.values) * torch.arange(32)).all()
    warps = live[:, 0].nonzero().flatten().tolist()
    if isinstance(store, OwnStore):
        return [(warp, None, int(to[warp, 0])) for warp in warps]
    program = store.program.view(-1, 32)
    assert (program == program[:, :1]).all()
    assert (store.barrier == barrier).all()
    return [(warp, int(program[warp, 0]), int(to[warp, 0])) for warp in warps]


def receive_rows(address, BLOCK_M, BLOCK_N, SPLITS):
    places = rows_places(BLOCK_M, BLOCK_N, SPLITS)
    tile = torch.full((BLOCK_M // SPLITS, BLOCK_N), float("nan"))
    return _receive(received(BLOCK_M, BLOCK_N, SPLITS, int(address)), *places, tile)


def receive_narrow(address, ROWS, BLOCK_N):
    tile = torch.full((ROWS, BLOCK_N), float("nan"))
    loads = received_narrow(ROWS, BLOCK_N, 1, int(address))
    return _receive(loads, *narrow_places(ROWS, BLOCK_N, 1), tile)


def _receive(loads, row, column, tile):
    registers = torch.full(row.shape, float("nan"))
    memory = me().read(me().first, len(me().memory)).view(torch.uint8)
    for load in loads:
        size = 4 * len(load.values)
        at = load.address[:, None] - me().first + torch.arange(size)
        registers[:, load.values] = memory[at].view(torch.float32)
    tile[row, column] = registers
    return tile.as_subclass(Value)


#: Stand-ins for what gluon_clusters.py lacks.
STEPS = {
    **ring_threads.STEPS,
    "send_rows": send_rows, "receive_rows": receive_rows, "rows_layout": lambda *tile: None,
    "send_narrow": send_narrow, "receive_narrow": receive_narrow,
}  # fmt: skip


def until_the_first_has_ended():
    """Hold the calling program back, for half of what the others wait at most."""
    deadline = time.monotonic() + PATIENCE / 2
    while not me().cluster.programs[0].ended and time.monotonic() < deadline:
        time.sleep(1e-3)

"""Copies of 16 bytes a thread on a CPU, as kernels of several warp groups ask for them."""

from __future__ import annotations

import threading


class Copies(threading.local):
    """Copies of 16 bytes a thread, each warp group's its own.

    What is asked for lands when its group is waited for, or at once, where it would destroy what
    has not been read yet. What the mask leaves out becomes 0 (test_attention_half_aot.py).
    """

    def __init__(self, at_once: bool = False) -> None:
        self.groups: list[list] = [[]]
        self.at_once = at_once

    def async_copy_global_to_shared(self, tile, pointer, mask):
        assert tile.data.shape == pointer.offset.shape
        self.groups[-1].append((tile, pointer, mask.expand_as(pointer.offset)))
        if self.at_once:
            self.land(self.groups[-1].pop())

    def commit_group(self):
        self.groups.append([])

    def wait_group(self, behind):
        assert not self.groups[-1], "copies of no group"
        while len(self.groups) > behind + 1:
            for copy in self.groups.pop(0):
                self.land(copy)

    def land(self, copy):
        tile, pointer, mask = copy
        tile.data.zero_()
        tile.data[mask] = pointer.base[pointer.offset[mask]]

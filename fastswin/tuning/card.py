"""The GPU that a configuration is for: what spaces and tables depend on."""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.device import multiprocessor_count


@dataclasses.dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        name: as its driver tells it.
        multiprocessors: of the GPU.
        capability: compute capability.
        shared_bytes: shared memory that one program may use, in bytes.
    """

    name: str
    multiprocessors: int
    capability: tuple[int, int]
    shared_bytes: int


#: Shared memory that a program may use on every supported card, where torch does not tell.
SHARED_BYTES_EVERYWHERE = 65536

#: Cards without a table of their own, and whose serves them: the same multiprocessors in the same
#: number, with the same shared memory, beside another memory (3.0 and 4.25 TB/s).
SIBLINGS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}

#: What plans and tests assume where there is no GPU, as multiprocessor_count does.
H100 = Card("NVIDIA H100 80GB HBM3", 132, (9, 0), 232448)


def card_of(device: torch.device) -> Card:
    """The card of a device; an H100 for the CPU, where only the interpreter runs kernels."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    return Card(
        properties.name,
        multiprocessor_count(device),
        (properties.major, properties.minor),
        getattr(properties, "shared_memory_per_block_optin", SHARED_BYTES_EVERYWHERE),
    )

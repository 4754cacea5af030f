"""Chains of launches on streams of a card that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def check_side_by_side(
    chains: Sequence[Callable[[], torch.Tensor]], expected: Sequence[torch.Tensor]
) -> None:
    """Five runs of each chain on a stream of its own have the bits of ``expected``."""
    streams = [torch.cuda.Stream() for _ in chains]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found: list[list[torch.Tensor]] = [[] for _ in chains]
    for _ in range(5):
        for stream, chain, results in zip(streams, chains, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(chain())
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert all(torch.equal(result, wanted) for result in results)

"""Whether a captured graph may be redirected to other images and results: one trial a capture.

Words of kernels' arguments do not tell all (graph_addresses.py):

    an address where no argument shows it, as in a table in memory or in an encoded descriptor
    an address of the pool, which was some earlier tensor's before a result's: its kernels would
    be redirected, too, and write past the end of a smaller result
    a library's kernel that computes an address from one that lies elsewhere

So a graph is replayed once as captured and once redirected, and what the second one read, wrote and
left alone has to be right to the bit. Tried first is the last kernel alone of all that have a
result's address: that is what writes logits, whoever had the memory before. Feature maps are
updated in place, so that all kernels are tried next, and then the images without the results. Each
takes two replays, and memory for two batches of images and for what lies behind results in the
pool, freed again; where all fail, calls copy as without a trial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastswin.engine.graph_addresses import GraphAddresses, RedirectError
from fastswin.engine.graph_driver import Driver, load_driver

#: Most memory of the pool behind a result that a trial sets aside to see whether it is written.
MAX_ROOM = 64 << 20


def redirect(
    graph: torch.cuda.CUDAGraph,
    images: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    driver: Driver | None = None,
) -> tuple[GraphAddresses | None, str]:
    """Addresses of a graph that a trial has shown can be changed, and why not all of them.

    Args:
        graph: captured with ``keep_graph=True`` and instantiated.
        images: the buffer that it reads; zeros afterwards.
        outputs: what it writes, floating-point; anything afterwards.
        driver: None means this process's.

    Returns:
        Addresses of images and results, of the images alone, or None. Until they are set the graph
        reads and writes the tensors that were given.
    """
    everything = (images, *outputs)
    reasons: list[str] = []
    for tensors, last in ((everything, True), (everything, False), ((images,), False)):
        what = "results" if tensors is everything else "images"
        try:
            if tensors is everything:
                _check_separate(everything)
            addresses = GraphAddresses(graph, tensors, driver or load_driver(), last)
            try:
                _try(graph, addresses, outputs)
            except BaseException:
                graph.instantiate()  # whatever was changed, a new instance has not
                raise
            return addresses, "" if tensors is everything else "; ".join(reasons)
        except (RedirectError, RuntimeError, OSError, AttributeError) as error:
            reason = f"{what} are copied: {error}"
            if reason not in reasons:
                reasons.append(reason)
        finally:
            images.zero_()
    return None, "; ".join(reasons)


def _check_separate(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that are not whole ones of their own."""
    if len({tensor.untyped_storage().data_ptr() for tensor in tensors}) < len(tensors):
        raise RedirectError("results share memory")
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.nbytes != tensor.untyped_storage().nbytes():
            raise RedirectError("a result is a view")


def _try(
    graph: torch.cuda.CUDAGraph, addresses: GraphAddresses, outputs: Sequence[torch.Tensor]
) -> None:
    """Replay as captured and redirected, on random images, and compare.

    The redirected replay finds NaN in the capture's buffers and in the fresh results. A kernel that
    was missed reads it there or leaves it here, so that the bits differ: the others are finite.
    Behind each fresh result lies as much as the pool has behind the captured one, where any tensor
    at that address ends, and must not be written; nor may the images.

    Raises:
        RedirectError: something is not as it must be; the message says what.
    """
    static, *captured = addresses.tensors
    images = _trial_images(static)
    static.copy_(images)
    graph.replay()
    expected = [out.clone() for out in outputs]
    if not all(bool(out.isfinite().all()) for out in expected):
        raise RedirectError("results of random images are not finite")
    rooms = [
        torch.full((_room(out),), 0xFF, device=out.device, dtype=torch.uint8) for out in captured
    ]
    results: Sequence[torch.Tensor] = [
        room[: out.nbytes].view(out.dtype).view(out.shape)  # NaN: all bits are ones
        for room, out in zip(rooms, captured, strict=True)
    ]
    for tensor in (static, *outputs):
        tensor.fill_(float("nan"))
    addresses.set(images, results)
    graph.replay()
    for got, wanted in zip(results or outputs, expected, strict=True):
        if not _same_bits(got, wanted):
            raise RedirectError("results differ when they are redirected")
    if not _same_bits(images, _trial_images(static)):
        raise RedirectError("the graph writes to its images")
    for room, out in zip(rooms, captured, strict=True):
        if not bool((room[out.nbytes :] == 0xFF).all()):
            raise RedirectError("a result's memory has been a longer tensor's before")
    addresses.set(static, captured)


def _trial_images(like: torch.Tensor) -> torch.Tensor:
    """Random images, the same in every call; the caller's random state is left alone."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(like.shape, device=like.device, dtype=like.dtype, generator=generator)


def _room(out: torch.Tensor) -> int:
    """Bytes from a tensor's address to the end of its segment of the allocator's memory."""
    start = out.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        room = int(segment["address"]) + int(segment["total_size"]) - start
        if segment["address"] <= start and room >= out.nbytes:
            if room > MAX_ROOM:
                raise RedirectError(f"{room >> 20} MiB of the pool lie behind a result")
            return room
    raise RedirectError("a result does not lie in the allocator's memory")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))

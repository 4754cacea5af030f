"""Programmatic dependent launch (PDL): a kernel starts while the one before it still runs.

A plain launch in a stream begins when its predecessor has drained, 1 to 1.5 us of idle card that
small batches pay 60 to 80 times. Launched with the attribute, a grid is scheduled as soon as every
program of its predecessor has triggered it (or has exited), runs up to its ``wait`` and is held
there until the predecessor has completed and its writes are visible. What may stand before the wait
is address arithmetic and whatever no kernel of the chain ever writes: weights, biases, packed bias
tables. They are loaded, or asked into L2, while the predecessor runs.

A program triggers when its own wait is over, so that one grid at most is ahead. Triggered at its
beginning, a chain's grids may be scheduled one behind the other long before their turn, where they
hold places and shared memory. Swin-T takes 4 % less time at batch 1 so than it took with triggers
at the beginning, Swin-B 2 % at 2 (H200, docs/performance.md).

The rule, which every kernel with a ``PDL`` constant keeps: **each program waits, on every path,
before its first access to an activation, be it a read or a write.** Why that is enough, for a
stream of kernels 0, 1, 2, ... of which some have the attribute:

- Claim: when kernel n has passed its wait (or, without the attribute, has begun), all kernels
  before n have completed. By induction: kernel n - 1 has completed at that moment, hence each of
  its programs has passed its own wait, hence by the claim all before n - 1 have completed.
- Read after write: follows, and visibility with it, since completion of a grid flushes its writes
  and what a grid saw through its own wait is ordered before them.
- Write after read, and memory that the caching allocator hands from one kernel to a later one of
  the same stream: every earlier reader has completed before n writes, however many launches back.
- A program that returned without waiting would break the claim (its grid could complete before its
  predecessor), so no early return stands before a wait.
- A kernel without the attribute (a library's GEMM, a copy) neither waits nor triggers. It begins
  when its predecessor has completed, and its successor is released when it has: ``ours -> library
  -> ours`` keeps the claim and gains nothing on the library's side. A library kernel that triggers
  early changes nothing: the wait is for completion, not for the trigger.
- No deadlock: the trigger fires once all programs of the predecessor are past their wait or gone,
  so waiting programs never hold a place that the predecessor still needs.
- Weights must have been written before the chain begins. The engine synchronises after it has
  prepared weights and bound a plan; public operators leave PDL off, since a training step writes
  weights from kernel to kernel.

Other streams are ordered by events, which see completion only.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fastswin._triton.available import interpreting

#: First compute capability with the instructions.
MIN_CAPABILITY = (9, 0)


def pdl_options(pdl: bool, capability: tuple[int, int]) -> dict[str, Any]:
    """Keywords of a launch: the kernel's constant, and the launch attribute where it is on.

    Args:
        pdl: whether the caller wants it.
        capability: of the GPU that runs the launch.
    """
    on = pdl and capability >= MIN_CAPABILITY and not interpreting()
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Hold until the grid before has completed and its writes are visible; then let the next in."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(ptr, elements, LINES: tl.constexpr, PDL: tl.constexpr):
    """Ask ``elements`` consecutive values (at most LINES lines of 128 bytes) from memory into L2.

    At batch 1 the weights of a Swin-T, 55 MB, do not survive in L2 from one forward pass to the
    next, so a GEMM that asks for them after its wait pays the memory's latency on top.
    """
    if PDL:
        per_line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        at = tl.minimum(tl.arange(0, LINES) * per_line, elements - 1)
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [(ptr + at).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

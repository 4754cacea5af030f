"""A barrier between all programs of a grid, in two halves, for kernels that stay on the card.

    arrive    what this program wrote so far counts as done
    wait      until every program has arrived ``goal / programs`` times

Between the two a program may load what no program of the grid writes: the weights of its next
piece of work are on their way while the slowest program finishes.

One counter, zero at the launch, only ever rises: the n-th wait is for ``n * programs`` arrivals,
and nothing is reset. Memory order: the program's threads meet, then one of them adds with release,
which covers what the others wrote; one polls with acquire, then they meet again. Acquire also drops
the multiprocessor's L1, so that later plain loads see what others wrote.

All programs must be resident at once: launch with ``launch_cooperative_grid=True``, which the
driver refuses where they do not fit. Interpreted programs run one after another and would wait
forever, so kernels take ``SYNC`` as a constant and are launched piece by piece there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr, SYNC: tl.constexpr):
    """Count this program in."""
    if SYNC:
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.u32 $0, 0;
            }""",
            "=r,l", [counter_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def wait(counter_ptr, goal, SYNC: tl.constexpr):
    """Hold until ``goal`` arrivals have been counted."""
    if SYNC:
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .u32 thread;
            .reg .s32 missing;
            mov.u32 thread, %tid.x;
            setp.ne.u32 p, thread, 0;
            @p bra ARRIVED;
            POLL:
            ld.acquire.gpu.global.s32 missing, [$1];
            sub.s32 missing, missing, $2;
            setp.lt.s32 p, missing, 0;
            @p bra POLL;
            ARRIVED:
            mov.u32 $0, 0;
            }""",
            "=r,l,r", [counter_ptr.to(tl.int64), goal], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()

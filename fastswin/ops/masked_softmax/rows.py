"""Which rows a problem has: leading axes folded into at most three, plus one axis to loop over.

A softmax over the last axis sees ``x [..., N]`` as rows. Bias and mask are broadcast over some
leading axes; their strides there are 0 and nothing is ever expanded. :func:`plan_rows` merges
neighbouring axes that every operand walks through with one stride, and picks the largest axis
along which the *pinned* operands (bias, mask, lengths, query index) do not change as ``loop``: a
program keeps their tile in registers and walks along it.

    window softmax, scores [B, nW, nH, N, N], bias [nH, N, N], mask [nW, 1, N, N]
    -> loop over B; rows are the nW * nH * N rows of one image, folded into sizes (nW, nH, N)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

#: Row axes the kernels decompose a row number into.
ROW_AXES = 3

Strides = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows of one problem.

    Attributes:
        loop: length of the axis that a program walks along, 1 where there is none.
        sizes: the three row axes, slowest first.
        strides: per operand, elements per step along ``(loop, *sizes)``.
    """

    loop: int
    sizes: tuple[int, int, int]
    strides: Mapping[str, Strides]

    @property
    def rows(self) -> int:
        return self.sizes[0] * self.sizes[1] * self.sizes[2]

    def without_loop(self) -> RowPlan | None:
        """The same rows with the loop axis as a row axis; None where all three are taken."""
        if self.loop == 1:
            return self
        if self.sizes[0] != 1:
            return None
        return RowPlan(
            1,
            (self.loop, *self.sizes[1:]),
            {name: (0, s[0], s[2], s[3]) for name, s in self.strides.items()},
        )

    def fill_blocks(self, block_rows: int, multiple: int = 1, waste: float = 0.1) -> RowPlan:
        """Move part of the loop into the rows where a block of rows would be badly filled.

        196 rows in blocks of 64 leave 23 % of the lanes idle; 16 x 196 rows leave none. With
        ``multiple``, also where the rows are no multiple of it: 147 rows are no pairs, 2 x 147 are.
        """

        def idle(rows: int) -> float:
            return 1.0 - rows / (-(-rows // block_rows) * block_rows)

        whole = self.rows % multiple == 0
        if self.sizes[0] != 1 or (whole and idle(self.rows) <= waste):
            return self
        factors = [
            f for f in (2, 4, 8, 16, 32, 64) if self.loop % f == 0 and self.rows * f % multiple == 0
        ]
        best = min(factors, key=lambda f: (idle(self.rows * f) > waste, f), default=1)
        if best == 1 or (whole and idle(self.rows * best) >= idle(self.rows)):
            return self
        return RowPlan(
            self.loop // best,
            (best, *self.sizes[1:]),
            {n: (s[0] * best, s[0], s[2], s[3]) for n, s in self.strides.items()},
        )


def plan_rows(
    sizes: Sequence[int],
    strides: Mapping[str, Sequence[int]],
    pinned: Collection[str],
) -> RowPlan | None:
    """Fold leading axes into rows.

    Args:
        sizes: leading axes of ``x``, without the keys.
        strides: per operand, elements per step along each leading axis; 0 where broadcast.
        pinned: operands whose tile stays the same along the loop axis; empty means no loop.

    Returns:
        The plan, or None where more than three row axes remain that cannot be merged.
    """
    axes: list[tuple[int, dict[str, int]]] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        step = {name: s[axis] for name, s in strides.items()}
        if axes and all(axes[-1][1][n] == step[n] * size for n in step):
            axes[-1] = (axes[-1][0] * size, step)
        else:
            axes.append((size, step))

    loop, loop_step = 1, dict.fromkeys(strides, 0)
    free = [i for i, (_, step) in enumerate(axes) if all(step[n] == 0 for n in pinned)]
    if pinned and free:
        loop, loop_step = axes.pop(max(free, key=lambda i: axes[i][0]))
    if len(axes) > ROW_AXES:
        return None
    padding = [(1, dict.fromkeys(strides, 0))] * (ROW_AXES - len(axes))
    axes = padding + axes
    return RowPlan(
        loop,
        (axes[0][0], axes[1][0], axes[2][0]),
        {n: (loop_step[n], axes[0][1][n], axes[1][1][n], axes[2][1][n]) for n in strides},
    )


def power_of_2_divisor(numbers: Sequence[int], limit: int) -> int:
    """Largest power of two up to ``limit`` that divides every number (0 counts as divisible)."""
    divisor = limit
    for n in numbers:
        while n % divisor:
            divisor //= 2
    return divisor

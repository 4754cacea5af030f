"""Sizes that both launchers and planners need; imports no Triton."""

from __future__ import annotations

#: Smallest side that ``tl.dot`` takes.
MIN_DOT = 16


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)`` for a positive b, without a negation: ``a`` may be symbolic (export)."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_columns(channels: int) -> tuple[int, int] | None:
    """``channels`` as two exact powers of two (96 = 64 + 32, 128 = 128 + 0), None if impossible."""
    largest = 1 << (channels.bit_length() - 1)
    rest = channels - largest
    if largest < MIN_DOT or (rest and (rest & (rest - 1) or rest < MIN_DOT)):
        return None
    return largest, rest

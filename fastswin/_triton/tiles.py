"""Sizes that both launchers and planners need; imports no Triton."""

from __future__ import annotations

#: Smallest side that ``tl.dot`` takes.
MIN_DOT = 16

#: Shortest sum of ``tl.dot`` on 8-bit operands; the interpreter takes any.
MIN_DOT_8_BITS = 32


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


def why_not_dot(sides: dict[str, int], depth: dict[str, int], narrow: bool = False) -> str | None:
    """Reason why tensor cores cannot multiply tiles of these sizes, None where they can.

    Args:
        sides: rows and columns of a product's tiles by the names of their options.
        depth: how many products are added at once, likewise.
        narrow: whether operands have 8 bits.
    """
    shortest = MIN_DOT_8_BITS if narrow else MIN_DOT
    for least, given in ((MIN_DOT, sides), (shortest, depth)):
        for name, size in given.items():
            if size < least or size & (size - 1):
                return f"{name} must be a power of two of at least {least}, got {size}"
    return None

"""Contenders of the suite "quant": a precision, and a variant of contenders.py.

A module of its own, which processes that measure side by side can import by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fastswin.bench.contenders import VARIANTS
from fastswin.bench.problems import PRECISIONS


@dataclasses.dataclass(frozen=True)
class Entry:
    """One contender: a precision and a variant of contenders.py."""

    dtype: str
    variant: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.variant}"

    @property
    def is_ours(self) -> bool:
        """Whether it is an engine of this package."""
        return self.variant.startswith("fastswin")

    @classmethod
    def parse(cls, text: str) -> Entry:
        """``int8`` or ``fp16:compile-reduce-overhead``.

        Raises:
            ValueError: an unknown precision or variant.
        """
        dtype, _, variant = text.strip().partition(":")
        variant = variant or "fastswin"
        if dtype not in PRECISIONS or variant not in VARIANTS:
            raise ValueError(
                f"contenders must be PRECISION or PRECISION:VARIANT with a precision of "
                f"{', '.join(PRECISIONS)} and a variant of {', '.join(VARIANTS)}, got {text!r}"
            )
        return cls(dtype, variant)


#: Both quantised formats as the engine mixes them, int8 with nothing left wide, and what they are
#: compared with.
DEFAULT_ENTRIES = (
    Entry("fp16", "fastswin"),
    Entry("int8", "fastswin"),
    Entry("fp8", "fastswin"),
    Entry("int8", "fastswin-scheme"),
)


def make_entries(
    dtypes: Sequence[str] | None, variants: Sequence[str] | None, device: torch.device
) -> list[Entry]:
    """Our engine in half precision (fp32 on a CPU), then in others, then other contenders.

    Args:
        dtypes: precisions beside the first; None takes int8 and fp8.
        variants: further contenders in the first precision, or "fastswin-scheme" in the others.
        device: what is measured.
    """
    base = "fp16" if device.type == "cuda" else "fp32"
    others = [dtype for dtype in dtypes or ("int8", "fp8") if dtype != base]
    entries = [Entry.parse(dtype) for dtype in (base, *others)]
    for variant in variants or ():
        own = others if variant == "fastswin-scheme" else [base]
        entries += [Entry.parse(f"{dtype}:{variant}") for dtype in own]
    return list(dict.fromkeys(entries))

"""What the bench of the library's GEMMs finds: a variant's algorithms, and blocks added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastswin.bench.op_library_linear_problems import PROBE, Layer, Variant


@dataclasses.dataclass
class Result:
    """One variant of one layer.

    Attributes:
        latency_us: by algorithm index; None where it was refused or wrong.
        notes: why, by algorithm index.
        told: what the library says about each algorithm.
        contender, contender_us: PyTorch's way.
        error: why there is no algorithm at all.
    """

    layer: Layer
    variant: Variant
    latency_us: list[float | None] = dataclasses.field(default_factory=list)
    notes: dict[int, str] = dataclasses.field(default_factory=dict)
    told: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    contender: str = ""
    contender_us: float | None = None
    error: str = ""

    @property
    def best(self) -> tuple[int, float] | None:
        """Index and microseconds of the fastest right algorithm."""
        timed = [(us, index) for index, us in enumerate(self.latency_us) if us is not None]
        return min(timed)[::-1] if timed else None

    def line(self) -> str:
        """One line of the table."""
        head = f"{self.layer.case:8s} {self.layer.kind:4s} {self.variant.name:22s}"
        if self.best is None:
            return f"{head} {self.error or 'no right algorithm: ' + '; '.join(self.notes.values())}"
        index, us = self.best
        first = self.latency_us[0]
        tflops = 2e-6 * self.layer.M * self.layer.N * self.layer.K / us
        text = f"{head} {us:7.2f} us #{index}/{len(self.latency_us)} {tflops:5.0f} T/s"
        text += f"  first {first:7.2f}" if first is not None else "  first refused"
        if self.contender_us is not None:
            text += f"  {self.contender} {self.contender_us:7.2f} = {self.contender_us / us:4.2f}x"
        if self.notes:
            text += f"  [{len(self.notes)} out: {next(iter(self.notes.values()))[:60]}]"
        return text

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "case": self.layer.case, "kind": self.layer.kind, "variant": self.variant.name,
            "M": self.layer.M, "N": self.layer.N, "K": self.layer.K,
            "latency_us": self.latency_us, "told": self.told,
            "notes": {str(k): v for k, v in self.notes.items()}, "contender": self.contender,
            "contender_us": self.contender_us, "error": self.error,
        }  # fmt: skip


#: Variants that make up a block, per way of computing it.
BLOCKS: dict[str, tuple[tuple[str, str], ...]] = {
    "fp16 library": (
        ("qkv", "fp16 bias"), ("proj", "fp16 bias+res"), ("fc1", "fp16 bias"),
        ("fc2", "fp16 bias+res"),
    ),
    "fp8 library": (
        ("qkv", "fp8 bias >fp8"), ("proj", "fp8 bias+res"), ("fc1", "fp8 bias+gelu >fp8"),
        ("fc2", "fp8 bias+res"),
    ),
    "fp8, proj fp16": (
        ("qkv", "fp8 bias >fp8"), ("proj", "fp16 bias+res"), ("fc1", "fp8 bias+gelu >fp8"),
        ("fc2", "fp8 bias+res"),
    ),
}  # fmt: skip


def summary(results: Sequence[Result]) -> list[str]:
    """The four GEMMs of a block added up, one line per stage; GELU of the fp16 rows left out."""
    found = {(r.layer.case, r.layer.kind, r.variant.name): r for r in results}
    lines = []
    for case in dict.fromkeys(r.layer.case for r in results if r.layer != PROBE):
        fp16 = [found.get((case, *part)) for part in BLOCKS["fp16 library"]]
        torch_us = [r.contender_us if r is not None else None for r in fp16]
        columns = [_sum("fp16 torch", torch_us)]
        for name, parts in BLOCKS.items():
            rows = [found.get((case, *part)) for part in parts]
            best = [r.best if r is not None else None for r in rows]
            columns.append(_sum(name, [b[1] if b is not None else None for b in best]))
        lines.append(f"{case:8s} block: " + "  ".join(columns))
    return lines


def _sum(name: str, parts_us: Sequence[float | None]) -> str:
    known = [us for us in parts_us if us is not None]
    return f"{name} {sum(known):7.1f} us" if len(known) == len(parts_us) else f"{name}       -"

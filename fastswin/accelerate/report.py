"""What an acceleration swapped, and what it left alone and why."""

from __future__ import annotations

import collections
import dataclasses


@dataclasses.dataclass(frozen=True)
class Swapped:
    """A module that runs on fused operators now.

    Attributes:
        name: its path in the model.
        kind: its own class.
        framework: whose module it is.
    """

    name: str
    kind: str
    framework: str


@dataclasses.dataclass(frozen=True)
class Kept:
    """A module that was recognised and left as it is.

    Attributes:
        name: its path in the model.
        kind: its class.
        reason: why, in one line.
    """

    name: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class AccelerateReport:
    """Result of :func:`fastswin.accelerate`.

    Attributes:
        swapped: modules on fused operators, in the model's order.
        kept: modules that were recognised and left alone, with reasons.
        notes: what else a user should know, one line each.
    """

    swapped: tuple[Swapped, ...]
    kept: tuple[Kept, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = collections.Counter((s.framework, s.kind) for s in self.swapped)
        lines = [f"swapped {n} {framework} {kind}" for (framework, kind), n in counts.items()]
        lines += [f"kept {k.name} ({k.kind}): {k.reason}" for k in self.kept]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

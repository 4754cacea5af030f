"""What happened while a checkpoint was loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Which weights went where; ``str(report)`` is for people.

    Attributes:
        layout: source layout, see :mod:`fastswin.models.checkpoint.detect`.
        prefix: what was stripped from the front of every name.
        wrapper: what the weights were wrapped in, such as "state_dict_ema".
        ema: whether the averaged weights were taken.
        config_from: "file", "config", "model_name" or "inferred".
        matched: official names that were loaded.
        missing: official names the checkpoint lacks; they keep their initial values.
        unexpected: names the model has no place for.
        reshaped: tables that were resized, each with its old and new shape.
        ignored: derived buffers and pre-training parts, which are never loaded.
    """

    layout: str
    prefix: str
    wrapper: str
    ema: bool
    config_from: str
    matched: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        """Share of the model's tensors that were loaded, 0 to 1."""
        return len(self.matched) / max(len(self.matched) + len(self.missing), 1)

    def __str__(self) -> str:
        origin = f"{self.layout} layout, configuration from {self.config_from}"
        if self.wrapper:
            origin += f", wrapper {self.wrapper!r}" + (" (averaged weights)" if self.ema else "")
        if self.prefix:
            origin += f", prefix {self.prefix!r} stripped"
        total = len(self.matched) + len(self.missing)
        lines = [origin, f"loaded {len(self.matched)} of {total} tensors ({self.coverage:.1%})"]
        for label in ("missing", "unexpected", "reshaped", "ignored"):
            names = getattr(self, label)
            if names:
                lines.append(f"{label} {len(names)}: {few(names)}")
        return "\n".join(lines)


def few(names: Sequence[str], count: int = 4) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more

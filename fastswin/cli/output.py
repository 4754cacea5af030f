"""Tables or JSON on stdout, progress on stderr.

Where ``--json`` is given stdout carries one JSON document and nothing else.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

#: Silence for this long, then a line at most this often.
PROGRESS_SECONDS = 2.0


def print_json(document: Any) -> None:
    """One JSON document on stdout; NaN and infinity become null, which JSON lacks."""
    print(json.dumps(_finite(document), indent=2, ensure_ascii=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, left: int = 1
) -> None:
    """A table on stdout, the first ``left`` columns aligned left and the rest right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    # a pipe has no width; wrapping there would split the rows of a table
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(Text(title, style="bold"), soft_wrap=True)  # a path must not be broken
    console.print(table)


def note(text: str) -> None:
    """One line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """Says on stderr how far a long job is: nothing for two seconds, then every two.

    Args:
        label: what is being done.
        total: steps in all; None where unknown.
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label, self.total = label, total
        self.done = 0
        self.started = self.last = time.monotonic()
        self.shown = False

    def advance(self, steps: int = 1, detail: str = "") -> None:
        """Count steps and print when it is time."""
        self.done += steps
        now = time.monotonic()
        if now - self.last >= PROGRESS_SECONDS:
            self.last = now
            self._print(detail or self._rate(now))

    def say(self, detail: str) -> None:
        """Print a stage of the job at once."""
        self._print(detail)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)

    def _rate(self, now: float) -> str:
        per_second = self.done / (now - self.started)
        if not self.total or not per_second:
            return ""
        return f"{(self.total - self.done) / per_second:.0f} s left"

    def _print(self, detail: str) -> None:
        of = f"/{self.total}" if self.total else ""
        text = f"{self.label} {self.done}{of}" if self.done or self.total else self.label
        text = f"{text}  {detail}" if detail else text
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
        self.shown = True

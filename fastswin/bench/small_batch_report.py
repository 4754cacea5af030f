"""Lines and records of the small-batch sweep, and the time that it has left."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Report:
    """Prints lines and keeps records."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "small_batch.json"
        self.start = time.monotonic()
        self.deadline = self.start + deadline_s
        self.records: list[dict[str, Any]] = []

    def line(self, text: str, **record: Any) -> None:
        print(f"[{time.monotonic() - self.start:5.1f}] {text}", flush=True)
        if record:
            self.records.append(record)
            self.path.write_text(json.dumps(self.records, indent=0), encoding="utf-8")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

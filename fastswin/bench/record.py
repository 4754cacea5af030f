"""The JSON record of a suite on one card: ``<root>/<card>/<suite>.json``.

The file is rewritten whole after every problem, by renaming, so a kill at any moment leaves either
the old file or the new one. A new run merges into what is there: its ``(case, dtype, batch,
variant, direction)`` replace the same ones, others stay. Because of that every record carries its
own commit, time, versions and measured ceilings; the copies at the top are those of the newest run.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastswin.data.atomic import write_text

Record = dict[str, Any]
Document = dict[str, Any]
Key = tuple[str, str, int, str, str]

#: Sets the commit where there is no git checkout (a copied tree).
COMMIT_VARIABLE = "FASTSWIN_COMMIT"

DEFAULT_ROOT = Path("benchmarks/results")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What all records of one run share.

    Attributes:
        suite: "model", "model_v2", ...
        created: UTC time, ISO 8601 with a Z.
        commit: of the measured tree, with ``-dirty`` where it had changes.
        gpu: name of the card, or of the processor.
        torch, triton: versions; None where Triton is absent.
        copy_tbs: measured copy rate, TB/s.
        gemm_tflops: measured large GEMM, TFLOP/s (fp16 on a GPU, fp32 on a CPU).
    """

    suite: str
    created: str
    commit: str
    gpu: str
    torch: str
    triton: str | None
    copy_tbs: float
    gemm_tflops: float

    @property
    def card(self) -> str:
        return card_slug(self.gpu)


def make_run_info(suite: str, device: torch.device, copy_tbs: float, gemm_tflops: float) -> RunInfo:
    """Describe this run: now, this tree, this device, these versions."""
    created = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return RunInfo(
        suite,
        created,
        current_commit(),
        device_name(device),
        torch.__version__,
        _triton_version(),
        round_significant(copy_tbs),
        round_significant(gemm_tflops),
    )


def device_name(device: torch.device) -> str:
    """The card's name as its driver tells it; ``cpu <model>`` for a processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return f"cpu {(names[0] if names else platform.machine()).strip()}"


def card_slug(name: str) -> str:
    """Folder name of a card: ``NVIDIA H100 80GB HBM3`` is ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def current_commit(folder: Path | None = None) -> str:
    """``git rev-parse HEAD`` of the package's tree, ``-dirty`` appended where it has changes.

    ``FASTSWIN_COMMIT`` overrides it; "unknown" where there is neither.
    """
    override = os.environ.get(COMMIT_VARIABLE)
    if override:
        return override
    folder = folder or Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return "unknown"
    # results are what a run writes: they do not make the code that wrote them dirty
    changes = _git(folder, "status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
    return head if changes == "" else f"{head}-dirty"


def record_key(record: Record) -> Key:
    """What makes two records the same measurement."""
    direction = record.get("direction", "forward")
    return record["case"], record["dtype"], record["batch"], record["variant"], direction


def merge_records(old: Iterable[Record], new: Iterable[Record], drop: Iterable[Key] = ()) -> list:
    """Old records with new ones in their places and ``drop`` removed, sorted by key."""
    merged = {record_key(record): record for record in old}
    for key in drop:
        merged.pop(key, None)
    merged.update((record_key(record), record) for record in new)
    return [merged[key] for key in sorted(merged)]


def make_document(info: RunInfo, records: Iterable[Record]) -> Document:
    """The whole file, in the field order of the format."""
    return {**dataclasses.asdict(info), "records": list(records)}


def stamp(info: RunInfo, record: Record) -> Record:
    """A record that tells its own run, floats rounded to 5 significant digits, no NaN."""
    own = {key: getattr(info, key) for key in ("commit", "created", "torch", "triton", "copy_tbs")}
    values = {**record, **{key: value for key, value in own.items() if key not in record}}
    return {key: _json_value(value) for key, value in values.items()}


def result_path(root: Path, info: RunInfo) -> Path:
    """``<root>/<card>/<suite>.json``."""
    return root / info.card / f"{info.suite}.json"


def load_document(path: Path) -> Document | None:
    """A stored document, None where there is none.

    Raises:
        ValueError: the file exists but is no record document.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        for record in document["records"]:
            record_key(record)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no benchmark record ({error}); move it away") from None
    return document


def save_records(
    path: Path, info: RunInfo, new: Iterable[Record], drop: Iterable[Key] = ()
) -> Document:
    """Merge ``new`` into the file at ``path``, atomically; returns what the file now holds.

    Args:
        path: from :func:`result_path`.
        info: this run, written at the top.
        new: stamped records.
        drop: keys whose older records are no longer true (a check that went red).

    Raises:
        ValueError: the existing file is no record document; nothing is written.
    """
    old = load_document(path)
    document = make_document(info, merge_records(old["records"] if old else [], new, drop))
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def round_significant(value: float, digits: int = 5) -> float:
    """``value`` with that many significant digits."""
    return float(f"{value:.{digits}g}")


def _json_value(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round_significant(value) if math.isfinite(value) else None


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__

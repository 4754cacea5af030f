"""What an export wrote and how far it is from the readable model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

Pair = tuple[int, int]


class ParityError(Exception):
    """The exported graph does not give the model's answers; no file was left."""


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """One comparison with the fp32 readable model.

    Attributes:
        images: ``"random"`` or ``"real"``.
        folded: whether the runtime's graph optimisation, constant folding included, was on.
        batch: images in the call.
        image_size: ``(height, width)`` in pixels.
        max_abs_diff: largest difference of any output element.
        top1_agreement: fraction of images with the same most probable class; None for features.
    """

    images: str
    folded: bool
    batch: int
    image_size: Pair
    max_abs_diff: float
    top1_agreement: float | None


@dataclasses.dataclass(frozen=True)
class Parity:
    """All comparisons of one export.

    Attributes:
        bound: the largest legal difference.
        max_abs_output: the model's largest output element on the images compared.
        rows: the comparisons.
    """

    bound: float
    max_abs_output: float
    rows: tuple[ParityRow, ...]

    @property
    def max_abs_diff(self) -> float:
        """Largest difference of all comparisons."""
        return max(row.max_abs_diff for row in self.rows)

    @property
    def top1_agreement(self) -> float | None:
        """Smallest agreement of all comparisons; None for features."""
        values = [row.top1_agreement for row in self.rows if row.top1_agreement is not None]
        return min(values) if values else None


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """One exported file.

    Attributes:
        path: the ``.onnx`` file; ``external_data`` is the weights' file beside it, or None.
        source: what was exported.
        precision, attention, opset, batch, image_size, dynamic_size, features, folded: the
            arguments, ``image_size`` and ``opset`` resolved.
        op_counts: nodes of the graph by operator.
        file_bytes: size of all written files.
        export_seconds: time until the file was written, the check not included.
        parity: the comparisons, or None without a check.
    """

    path: Path
    external_data: Path | None
    source: str
    precision: str
    attention: str
    opset: int
    batch: int | str
    image_size: Pair
    dynamic_size: bool
    features: bool
    folded: bool
    op_counts: Counter[str]
    file_bytes: int
    export_seconds: float
    parity: Parity | None

    @property
    def node_count(self) -> int:
        """Nodes of the graph."""
        return self.op_counts.total()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        values = dataclasses.asdict(self)
        values["path"] = str(self.path)
        values["external_data"] = self.external_data and str(self.external_data)
        values["op_counts"] = dict(self.op_counts.most_common())
        values["node_count"] = self.node_count
        if self.parity is not None:
            values["parity"] |= {
                "max_abs_diff": self.parity.max_abs_diff,
                "top1_agreement": self.parity.top1_agreement,
            }
        return values

"""Which products onto the stream are one kernel with the LayerNorm behind them (ops/linear_norm).

    proj "rows"   attention's output projection, every pending bias, residual, the second LayerNorm
    mlp "rows"    fc2 with the residual and the next block's first LayerNorm, in all blocks of a
                  stage but the last; before it our LayerNorm and our fc1 with GELU, as in "library"

V1 only: in V2 the norm comes before the residual. Which ranges of rows take it is data; what a
table does not list keeps the forms of its own, as everything does where the kernel's blocker
objects (the stage's reasons then say so).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fastswin._triton.device import device_capability
from fastswin.ops.linear_norm.config import LinearNormConfig, linear_norm_blocker


@dataclasses.dataclass(frozen=True)
class RowsRange:
    """Rows of a batch for which the kernel is taken.

    Attributes:
        fewest, most: tokens of the batch in the stage, both included.
        config: tiles; None takes the operator's heuristic.
    """

    fewest: int = 1
    most: int = 1 << 62
    config: LinearNormConfig | None = None


#: By (layer, channels, format of the product, format of the normalised rows): layer is "proj" or
#: "fc2", formats are "wide", "int8" or "fp8". The first range that holds the batch's rows counts.
WholeRows = Mapping[tuple[str, int, str, str], tuple[RowsRange, ...]]

#: Major compute capabilities for which the table holds.
MEASURED_CAPABILITIES = (9, 10)

#: Where one kernel was faster than two in a chain of its own, rows that one round of programs holds
#: (H200): 384 channels in fp8 9.15 us against 10.09, 256 in half precision 7.10 against 7.57. At
#: 384, 512 and 768 channels in half precision, at more rows and as fc2 it is 5 to 90 % slower.
MEASURED: WholeRows = {
    ("proj", 384, "fp8", "fp8"): (
        RowsRange(6000, 8448, LinearNormConfig(64, 128, 128, 8, 3, tma=True, early=True)),
    ),
    ("proj", 256, "wide", "wide"): (
        RowsRange(6000, 8448, LinearNormConfig(64, 128, 64, 4, 3, tma=True)),
    ),
}

#: The engine's: nothing before a whole model has been measured with it, as forms are judged there.
WHOLE_ROWS: WholeRows = {}


def default_whole_rows(device: torch.device) -> WholeRows:
    """The engine's table where it was measured, an empty one elsewhere."""
    return WHOLE_ROWS if device_capability(device)[0] in MEASURED_CAPABILITIES else {}


@dataclasses.dataclass(frozen=True)
class RowsProblem:
    """One layer of a stage that may be taken.

    Attributes:
        layer: "proj" or "fc2".
        rows: tokens of the batch.
        channels: of the stage, ``depth`` input channels of the product.
        product, stored: formats of the product and of the normalised rows.
        capability: of the GPU.
    """

    layer: str
    rows: int
    channels: int
    depth: int
    product: str
    stored: str
    capability: tuple[int, int]


def choose_whole_rows(
    table: WholeRows, problem: RowsProblem, reasons: dict[str, str], launch: dict[str, Any]
) -> bool:
    """Whether a layer is taken; then its reason and tiles are noted in ``reasons`` and ``launch``.

    Args:
        table: ranges by layer.
        problem: the layer.
        reasons, launch: the stage's, changed in place.
    """
    key = problem.layer, problem.channels, problem.product, problem.stored
    ranges = table.get(key, ())
    found = next((r for r in ranges if r.fewest <= problem.rows <= r.most), None)
    if found is None:
        return False
    itemsize = 2 if problem.product == "wide" else 1
    blocker = linear_norm_blocker(
        problem.channels, problem.depth, itemsize, problem.capability, found.config
    )
    if blocker is not None:
        reasons[f"{problem.layer} by rows"] = blocker
        return False
    reasons[problem.layer] = f"{problem.rows} rows: one kernel with the LayerNorm behind it"
    launch.pop(problem.layer, None)
    if found.config is not None:
        launch[problem.layer] = found.config
    return True

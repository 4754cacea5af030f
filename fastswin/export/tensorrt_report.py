"""What a TensorRT build took and made."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class BatchRange:
    """Batches that an engine takes, and the one its tactics are chosen for.

    Raises:
        ValueError: not ``1 <= smallest <= usual <= largest``.
    """

    smallest: int = 1
    usual: int = 8
    largest: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.usual <= self.largest:
            raise ValueError(
                "batches must satisfy 1 <= smallest <= usual <= largest, "
                f"got {self.smallest}, {self.usual}, {self.largest}"
            )

    def __str__(self) -> str:
        return f"{self.smallest}:{self.usual}:{self.largest}"


@dataclasses.dataclass(frozen=True)
class TensorRtReport:
    """One engine.

    Attributes:
        path: the engine file.
        runtime: name and version of what built it and can run it.
        capabilities: compute capabilities it is for, 86 for 8.6; empty: the builder's GPU.
        batches: what it takes; None where the graph has a fixed batch.
        tf32: whether fp32 products may use TF32.
        plugins: layers that run our kernels.
        network_layers: layers of the network before optimisation, by type.
        engine_layers: layers of the engine, by kind, as the builder's log lists them; empty where
            it lists none.
        engine_bytes: size of the file.
        parse_seconds, build_seconds: time of the parser and of the builder.
    """

    path: Path
    runtime: str
    capabilities: tuple[int, ...]
    batches: BatchRange | None
    tf32: bool
    plugins: int
    network_layers: Counter[str]
    engine_layers: Counter[str]
    engine_bytes: int
    parse_seconds: float
    build_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        values = dataclasses.asdict(self)
        values["path"] = str(self.path)
        values["capabilities"] = list(self.capabilities)
        values["network_layers"] = dict(self.network_layers.most_common())
        values["engine_layers"] = dict(self.engine_layers.most_common())
        return values

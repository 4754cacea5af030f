"""Compile the persistent stage of Swin-B for one GPU generation; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Its argument
is the capability, 90 for 9.0.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from unittest import mock

import torch

from fastswin.ops.persistent_stage import launch
from fastswin.ops.persistent_stage.config import StageShape
from fastswin.ops.persistent_stage.packing import COLUMNS, PackedStage
from fastswin.testing.aot import compile_launch, record_launches


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


if __name__ == "__main__":
    addresses, table = empty(18, COLUMNS, dtype=torch.int64), empty(8, dtype=torch.float16)
    shape = StageShape(1, (14, 14), 512, 16, 2048, (7, 7), (3, 3))
    x = empty(1, 14, 14, 512, dtype=torch.float16)
    with (
        mock.patch.object(launch, "multiprocessor_count", return_value=132),
        record_launches() as launches,
    ):
        packed = PackedStage(addresses, shape.hidden, table, ())
        launch.persistent_stage_fwd(x, packed, shape, 0.2, 1e-5)
    for one in launches:
        compiled = dataclasses.asdict(compile_launch(one, int(sys.argv[1])))
        print(json.dumps(compiled | {"options": one.options, "grid": one.grid}), flush=True)

"""Compile the Hopper product's forms for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json

import torch

from fastswin.engine.tf32 import ROUNDED_TILES
from fastswin.ops.hopper_gemm.config import (
    DEFAULT_BACKWARD,
    DEFAULT_CONFIG,
    MEASURED,
    HopperGemmConfig,
)
from fastswin.ops.hopper_gemm.launch import (
    hopper_epilogue_bwd,
    hopper_epilogue_fwd,
    hopper_linear_fwd,
)
from fastswin.testing.aot import Launch, compile_launch, record_launches

#: Four rounds and halves; the same without, and with an edge inside a tile.
M, N, K = 6272, 1536, 384
OTHER_SHAPES = {"whole tiles": (8192, N, K), "edge": (M, 1544, K)}

#: The default tiles in every form, and whatever a card has chosen; K is no part of a binary.
FORMS = {
    ("linear", DEFAULT_CONFIG),
    ("training", DEFAULT_CONFIG),
    ("backward", DEFAULT_BACKWARD),
    ("tf32", ROUNDED_TILES),
    *((form, config) for (form, _), config in MEASURED.items()),
}


def launch_of(
    form: str, config: HopperGemmConfig, shape: tuple[int, int, int] = (M, N, K)
) -> Launch:
    """The product as its launcher launches it."""
    M, N, K = shape
    dtypes = {"linear": torch.float16, "plain": torch.float16, "tf32": torch.float32}
    dtype = dtypes.get(form, torch.bfloat16)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    bias = torch.empty(N, dtype=torch.float32, device="meta")
    with record_launches() as found:
        if form in dtypes:
            out = empty(M, N)
            gelu = form != "plain"
            hopper_linear_fwd(empty(M, K), empty(N, K), bias, gelu=gelu, out=out, config=config)
        elif form == "training":
            hopper_epilogue_fwd(empty(M, K), empty(N, K), bias, config)
        else:
            hopper_epilogue_bwd(
                empty(M, K), empty(M, N), empty(K, N), need_act=True, need_bias=True, config=config
            )
    return next(launch for launch in found if launch.name == "_hopper_gemm_kernel")


if __name__ == "__main__":
    for form, config in sorted(FORMS, key=str):
        compiled = dataclasses.asdict(compile_launch(launch_of(form, config), 90))
        print(json.dumps(compiled | {"form": form, "config": str(config)}), flush=True)
    for name, shape in OTHER_SHAPES.items():
        compiled = dataclasses.asdict(
            compile_launch(launch_of("linear", DEFAULT_CONFIG, shape), 90)
        )
        print(json.dumps(compiled | {"form": "linear", "config": name}), flush=True)

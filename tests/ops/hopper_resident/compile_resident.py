"""Compile the resident kernels' forms for compute capability 9.0; prints JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import torch

from fastswin.ops.hopper_resident.config import (
    ResidentMlpConfig,
    ResidentProductConfig,
    default_resident_mlp,
    default_resident_product,
)
from fastswin.ops.hopper_resident.launch import resident_mlp_fwd, resident_product_fwd
from fastswin.testing.aot import Launch, compile_launch, record_launches
from fastswin.tuning.card import H100
from fastswin.tuning.problem import make_problem
from fastswin.tuning.space import candidates

#: Rows of Swin's first stage at batch 32.
M = 100352

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def resident(op: str, dtype: str, **dims: int) -> list:
    """The resident configurations among the tuner's candidates."""
    found = candidates(make_problem(op, dtype, M, **dims), H100)
    return [c for c in found if isinstance(c, ResidentProductConfig | ResidentMlpConfig)]


def product(config: ResidentProductConfig, dtype: str, C: int, offset: bool) -> Launch:
    """qkv as its launcher launches it."""
    x, w = empty(dtype, M, C), empty(dtype, 3 * C, C)
    bias, shift = empty("fp32", 3 * C), empty("fp32", C) if offset else None
    with record_launches() as found:
        resident_product_fwd(x, w, bias, shift, 1e-5, empty(dtype, M, 3 * C), config)
    return found[0]


def mlp(config: ResidentMlpConfig, dtype: str, C: int, post_norm: bool, offset: bool) -> Launch:
    """A block's MLP half as its launcher launches it, in place."""
    x, vector = empty(dtype, M, C), empty("fp32", C)
    fc1 = empty(dtype, 4 * C, C), empty("fp32", 4 * C)
    fc2 = empty(dtype, C, 4 * C), vector
    norm = (vector, vector) if post_norm else None
    with record_launches() as found:
        resident_mlp_fwd(x, fc1, fc2, norm, vector if offset else None, 1e-5, x, config, pdl=True)
    return found[0]


def empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=DTYPES.get(dtype, torch.float32), device="meta")


def forms():
    """Every form with what describes it: all candidates in fp16 with an offset, whatever the engine
    takes by itself in bf16 without."""
    for dtype, C in itertools.product(DTYPES, (96, 128)):
        first = dtype == "fp16"
        found = resident("layer_norm_linear", dtype, N=3 * C, K=C, gelu=0)
        assert found[0] == default_resident_product(M, 3 * C, C, H100.multiprocessors)
        for config in found if first else found[:1]:
            yield "product", C, dtype, config, product(config, dtype, C, first)
        found = resident("mlp", dtype, C=C, hidden=4 * C, post_norm=0)
        assert found[0] == default_resident_mlp(M, 4 * C, C, H100.multiprocessors)
        for config in found if first else found[:1]:
            for post_norm in (False, True) if first else (False,):
                form = "mlp, norm behind" if post_norm else "mlp, norm first"
                yield form, C, dtype, config, mlp(config, dtype, C, post_norm, first)


if __name__ == "__main__":
    for form, C, dtype, config, launch in forms():
        compiled = dataclasses.asdict(compile_launch(launch, 90))
        about = {"form": form, "C": C, "dtype": dtype, "config": dataclasses.asdict(config)}
        print(json.dumps(compiled | about), flush=True)

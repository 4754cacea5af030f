"""Compile the training kernels of residual, norm, merging and MLP for one GPU; JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from fastswin.ops.feed_forward.backward import gelu_bwd
from fastswin.ops.patch_merging.backward import gather_layer_norm_bwd
from fastswin.ops.patch_merging.forward import gather_layer_norm_fwd
from fastswin.ops.residual_norm.backward import residual_norm_bwd
from fastswin.ops.residual_norm.forward import residual_norm_fwd
from fastswin.testing.aot import compile_launch, record_launches

#: Channels of Swin-T's first block, and of Swin-L's widest merging norm.
WIDTHS = {"all": (96, 3072), "sample": (3072,)}

#: Channels of the maps that are merged: of Swin-T's first stage, and of Swin-L's third.
MAPS = {"all": (96, 768), "sample": (768,)}


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(C: int, stream: torch.dtype, half: torch.dtype) -> None:
    """Every form with all of its options, then the plain norm."""
    x, branch = empty(8, 56, 56, C, dtype=stream), empty(8, 56, 56, C, dtype=half)
    vector = empty(C, dtype=torch.float32)
    scale, rows = empty(8, dtype=half), empty(8, 56, 56, dtype=torch.float32)
    everything = [True] * 4
    for norm in (0, 1, 2):
        residual_norm_fwd(x, branch, vector, vector, vector, scale, 1e-5, norm, stream, half)
        residual_norm_bwd(
            x, branch, x if norm == 1 else branch, rows, rows, vector, vector, scale, norm,
            everything, stream, half,
        )  # fmt: skip
    residual_norm_fwd(x, None, vector, vector, None, None, 1e-5, 1, stream, half)
    residual_norm_bwd(
        x, branch, x, rows, rows, vector, None, None, 1, [True, False, True, False], stream, half
    )
    gelu_bwd(empty(64, 4 * C, dtype=half), empty(64, 4 * C, dtype=half), need_h=True,
             need_bias=True)  # fmt: skip


def launch_merging(C: int, stream: torch.dtype, half: torch.dtype) -> None:
    """Patch merging of V1 on whole and odd maps, and of V2 (no norm)."""
    vector = empty(4 * C, dtype=torch.float32)
    for side in (56, 15):
        x = empty(8, side, side, C, dtype=stream)
        merged = (side + 1) // 2
        rows = empty(8, merged, merged, dtype=torch.float32)
        d_out = empty(8, merged, merged, 4 * C, dtype=half)
        gather_layer_norm_fwd(x, vector, vector, 1e-5, True, half)
        gather_layer_norm_bwd(d_out, x, rows, rows, vector, side, side, [True, True], stream)
    gather_layer_norm_fwd(x, None, None, 0.0, False, half)
    gather_layer_norm_bwd(d_out, None, None, None, None, 15, 15, [True, False], stream)


def main(capability: int, selection: str) -> None:
    with record_launches() as launches:
        for C in WIDTHS[selection]:
            launch(C, torch.float32, torch.float16)
        for C in MAPS[selection]:
            launch_merging(C, torch.float32, torch.float16)
    done = set()
    for found in launches:
        key = (found.name, *((k, getattr(v, "dtype", v) if k != "M" else 0)
                             for k, v in found.arguments.items()))  # fmt: skip
        if key not in done:
            done.add(key)
            compiled = dataclasses.asdict(compile_launch(found, capability))
            print(json.dumps(compiled | {"C": found.arguments.get("C")}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Register the plugins, let the front-end plan layers, print what an engine would hold, as JSON.

A program of its own: Triton decides once per process whether kernels are interpreted. Beside every
launch stands that of the PyTorch operator's launcher on meta tensors of the same shape.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
from tensorrt_stand_in import front_end, plan

from fastswin.export.plugin import register_plugins
from fastswin.export.plugin_launch import AttentionLayer, compile_attention
from fastswin.ops.layer_norm.forward import layer_norm_fwd
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.ops.window_attention.forward import window_attention_fwd
from fastswin.testing.aot import assembler_report, record_launches

DTYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CAPABILITIES = (75, 80, 86, 89, 90, 120)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer and the shapes that its engine will see; the first is the one it is tuned for."""

    name: str
    capability: int
    shapes: tuple[tuple[int, int, int], ...]
    window: int = 7
    shift: int = 3
    heads: int = 3
    dtype: str = "fp16"
    bias_dtype: str = "fp16"
    cosine: bool = False
    dynamic_map: bool = False


SQUARE = ((8, 28, 28), (1, 28, 28), (2, 28, 28), (3, 28, 28), (64, 28, 28))

ATTENTION = (
    *(Attention(f"v1-w7-sm{c}", c, SQUARE) for c in CAPABILITIES),
    Attention("v2-w8", 90, ((4, 32, 16), (1, 32, 16), (9, 32, 16)), 8, 4, 6, cosine=True,
              bias_dtype="fp32"),
    Attention("padded-map", 86, ((2, 30, 17), (5, 30, 17)), shift=0),
    Attention("any-map", 80, ((2, 20, 24), (1, 7, 7), (3, 9, 40), (2, 56, 56), (7, 1, 15)),
              dtype="bf16", dynamic_map=True),
    Attention("fp32-w7", 90, ((1, 14, 14), (6, 14, 14)), dtype="fp32", bias_dtype="fp32"),
    Attention("w8-needs-fewer-stages", 86, ((8, 32, 32), (3, 32, 32)), 8, 4, 4, cosine=True,
              bias_dtype="fp32"),
    Attention("w20-online", 90, ((2, 40, 20), (1, 40, 20)), 20, 10, 2, bias_dtype="fp32"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Norm:
    name: str
    capability: int
    channels: int = 96
    dtype: str = "fp16"
    weight_dtype: str = "fp16"
    shapes: tuple[tuple[int, int, int], ...] = SQUARE


NORMS = (
    *(Norm(f"norm-sm{c}", c) for c in CAPABILITIES),
    Norm("norm-100-channels", 86, 100, "fp32", "fp32", ((2, 5, 7), (1, 1, 1), (3, 9, 2))),
)


def drive_attention(trt: Any, case: Attention) -> dict[str, Any]:
    B, H, W = case.shapes[0]
    channels, N = 96 * case.heads, padded_tokens(case.window**2)
    kinds = 4 if case.shift else 1
    symbols = ("B", "H", "W") if case.dynamic_map else ("B",)
    largest = {s: max(shape["BHW".index(s)] for shape in case.shapes) for s in symbols}
    planned = plan(
        trt, "PackedWindowAttention",
        {"num_heads": case.heads, "window_height": case.window, "window_width": case.window,
         "shift_height": case.shift, "shift_width": case.shift, "cosine": int(case.cosine),
         "capability": case.capability, "multiprocessors": 0},
        [(DTYPES[case.dtype], ["B", *(("H", "W") if case.dynamic_map else (H, W)), channels]),
         (DTYPES[case.bias_dtype], [kinds, case.heads, N, N]), ("FLOAT", [case.heads]),
         ("FLOAT", [channels])],
        {s: case.shapes[0]["BHW".index(s)] for s in symbols}, largest,
    )  # fmt: skip
    layer = AttentionLayer(
        case.dtype, case.bias_dtype, B, (H, W), (largest.get("H", H), largest.get("W", W)),
        not case.dynamic_map, case.heads, 32, (case.window,) * 2, (case.shift,) * 2, case.cosine,
        case.capability,
    )  # fmt: skip
    config, _ = compile_attention(layer)
    with record_launches() as launches:
        for shape in case.shapes:
            window_attention_fwd(
                torch.empty(*shape, channels, dtype=TORCH[case.dtype], device="meta"),
                torch.empty(kinds, case.heads, N, N, dtype=TORCH[case.bias_dtype], device="meta"),
                torch.empty(case.heads, device="meta") if case.cosine else None,
                torch.empty(channels, device="meta"), 32**-0.5, case.heads, (case.window,) * 2,
                (case.shift,) * 2, False, config=config,
            )  # fmt: skip
    result = describe(planned, case, launches, case.shapes, channels // 3)
    first = launches[0]
    # a plugin is launched without the attribute that programmatic dependent launches need
    other = ("H", "W", "PDL")
    wanted = {k: v for k, v in first.arguments.items() if k.isupper() and k not in other}
    result["constants"] = layer.constants(config)
    result["launcher_constants"] = wanted
    result["launcher_integers"] = [
        [launch.arguments[k] for k in ("H", "W", "windows_per_col", "windows_per_row")]
        for launch in launches
    ]
    result["launcher_kernel"] = first.name
    result["chosen_by_operator"] = config == layer.default_config()
    return result


def drive_norm(trt: Any, case: Norm) -> dict[str, Any]:
    planned = plan(
        trt, "LayerNorm", {"capability": case.capability},
        [(DTYPES[case.dtype], ["B", "H", "W", case.channels]),
         (DTYPES[case.weight_dtype], [case.channels]), (DTYPES[case.weight_dtype], [case.channels]),
         ("FLOAT", [1])],
        dict(zip("BHW", case.shapes[0], strict=True)),
        {s: max(shape["BHW".index(s)] for shape in case.shapes) for s in "BHW"},
    )  # fmt: skip
    vector = torch.empty(case.channels, dtype=TORCH[case.weight_dtype], device="meta")
    with record_launches() as launches:
        for shape in case.shapes:
            x = torch.empty(*shape, case.channels, dtype=TORCH[case.dtype], device="meta")
            layer_norm_fwd(x, vector, vector, 1e-5, None, None, None)
    result = describe(planned, case, launches, case.shapes, case.channels)
    result["launcher_integers"] = [[launch.arguments["M"]] for launch in launches]
    return result


def describe(planned: Any, case: Any, launches: list, shapes: Any, channels: int) -> dict[str, Any]:
    sizes = [dict(zip("BHW", shape, strict=True)) for shape in shapes]
    registers, spilled, _ = assembler_report(planned.ptx, case.capability)
    return {
        "name": case.name,
        "capability": case.capability,
        "kernel": planned.kernel,
        "ptx": planned.ptx,
        "registers": registers,
        "spilled_bytes": spilled,
        "output_types": [t.name for t in planned.output_types],
        "output_shapes": [planned.output_shape(s) for s in sizes],
        "wanted_shapes": [[*shape, channels] for shape in shapes],
        "grids": [planned.grid(s) for s in sizes],
        "launcher_grids": [launch.grid for launch in launches],
        "block": planned.block,
        "launcher_threads": 32 * launches[0].options["num_warps"],
        "shared_bytes": planned.shared_bytes,
        "integers": [planned.integers(s) for s in sizes],
        "dtype": DTYPES[case.dtype],
    }


if __name__ == "__main__":
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    with front_end() as tensorrt:
        register_plugins()
        for case in (*ATTENTION, *NORMS)[part::parts]:
            drive = drive_attention if isinstance(case, Attention) else drive_norm
            print(json.dumps(drive(tensorrt, case)), flush=True)

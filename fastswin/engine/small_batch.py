"""Forms of a stage with few rows: our kernels only, one launch a product.

    qkv    LayerNorm + GEMM        one-shot            proj   GEMM + residual   one-shot
    fc1    LayerNorm + GEMM, GELU  one-shot            fc2    GEMM + residual   sliced along K
    merge  gather + LayerNorm + GEMM, one-shot

The library's GEMMs take part in no programmatic dependent launch and ask for their weights only
once the kernel before them has drained; at batch 1 that, not the product, is what they cost.
"""

from __future__ import annotations

from fastswin.ops.linear.config import (
    default_one_shot_config,
    default_sliced_config,
    one_shot_blocker,
)
from fastswin.ops.patch_merging.api import merge_blocker
from fastswin.tuning.problem import LaunchConfig

#: First compute capability with programmatic dependent launch.
PDL_CAPABILITY = (9, 0)


def small_stage(
    choice: dict[str, str],
    reasons: dict[str, str],
    M: int,
    C: int,
    hidden: int,
    merged: int,
    multiprocessors: int,
) -> dict[str, LaunchConfig]:
    """Take the small forms where the kernels can, unless a table has measured others.

    Args:
        choice, reasons: the stage's forms by layer, changed in place.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP, ``merged`` rows after merging.
        multiprocessors: of the GPU.

    Returns:
        Tiles by layer.
    """
    launch: dict[str, LaunchConfig] = {}
    why = f"{M} rows: bound by launches"
    if choice["merge"] == "triton" and merge_blocker(C) is None:
        choice["merge"], reasons["merge"] = "fused", why
        launch["merge"] = default_one_shot_config(
            merged, 2 * C, 4 * C, multiprocessors, gather=True
        )
    if one_shot_blocker(C) is not None:
        return launch
    choice["proj"], reasons["proj"] = "fused", why
    launch["proj"] = default_one_shot_config(M, C, C, multiprocessors)
    if not reasons.get("qkv", "").startswith("measured"):
        choice["qkv"], reasons["qkv"] = "fused", why
        launch["qkv"] = default_one_shot_config(M, 3 * C, C, multiprocessors)
    if not reasons.get("mlp", "").startswith("measured") and hidden % 16 == 0:
        choice["mlp"], reasons["mlp"] = "split", why
        launch["fc1"] = default_one_shot_config(M, hidden, C, multiprocessors)
        launch["fc2"] = default_sliced_config(M, C, hidden, multiprocessors, PDL_CAPABILITY)
    return launch

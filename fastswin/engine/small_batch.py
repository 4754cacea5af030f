"""Forms of a stage with few rows, launched programmatically (measured at batch 1 on an H100).

    C <= 128   LayerNorm inside one-shot GEMMs (qkv, fc1), proj one-shot, fc2 by our GEMM
    wider      LayerNorm, then our GEMMs by the tensor copy engine (qkv, proj, fc1); fc2 by the
               library in place, which splits K and is still faster

The library's GEMMs take part in no programmatic launch and ask for their weights only once the
kernel before them has drained: 3.1 to 3.4 us where ours takes 2.0 to 3.1 for proj.
"""

from __future__ import annotations

from fastswin.ops.linear.config import default_one_shot_config, one_shot_blocker
from fastswin.tuning.problem import LaunchConfig

#: First compute capability with programmatic dependent launch.
PDL_CAPABILITY = (9, 0)


#: Widest stage whose rows a one-shot program keeps in registers without losing to the copy engine.
ONE_SHOT_CHANNELS = 128


def small_stage(
    choice: dict[str, str], reasons: dict[str, str], M: int, C: int, hidden: int, processors: int
) -> dict[str, LaunchConfig]:
    """Take the small forms where the kernels can, unless a table has measured others.

    Args:
        choice, reasons: the stage's forms by layer, changed in place.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP.
        processors: multiprocessors of the GPU.

    Returns:
        Tiles by layer, where they are not their operator's heuristic.
    """
    launch: dict[str, LaunchConfig] = {}
    narrow = C <= ONE_SHOT_CHANNELS and one_shot_blocker(C) is None
    forms = {"qkv": "fused" if narrow else "tiled", "mlp": "split" if narrow else "library"}
    for layer, form in forms.items():
        if not reasons.get(layer, "").startswith("measured"):
            choice[layer], reasons[layer] = form, f"{M} rows: bound by launches"
    choice["proj"], reasons["proj"] = "fused", f"{M} rows: bound by launches"
    if narrow:
        launch["proj"] = default_one_shot_config(M, C, C, processors)
        if choice["qkv"] == "fused":
            launch["qkv"] = default_one_shot_config(M, 3 * C, C, processors)
        if choice["mlp"] == "split" and C == ONE_SHOT_CHANNELS:
            launch["fc1"] = default_one_shot_config(M, hidden, C, processors)
    return launch

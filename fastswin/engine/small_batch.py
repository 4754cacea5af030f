"""Forms of a stage with few rows, launched programmatically (measured at batch 1).

    V1, C <= 128   LayerNorm inside one-shot GEMMs (qkv, fc1), proj and fc2 one-shot
    V1, wider      LayerNorm, then our GEMMs by the tensor copy engine (qkv, fc1); proj one-shot up
                   to 512 channels; fc2 cut along K, joined by the next LayerNorm (ops/split_k)
    V2             our GEMMs without LayerNorm; proj's branch normed onto the stream, fc2 cut along
                   K and joined with its norm

The library's GEMMs take part in no programmatic launch and ask for their weights only once the
kernel before them has drained: 3.1 to 3.4 us where ours takes 1.9 to 3.9 for proj.
"""

from __future__ import annotations

from fastswin.ops.linear.config import (
    OneShotConfig,
    default_one_shot_config,
    one_shot_blocker,
)
from fastswin.ops.split_k.config import SplitKConfig, default_split_k_config, split_k_blocker
from fastswin.tuning.problem import LaunchConfig

#: Tiles of one layer in a plan.
LayerTiles = LaunchConfig | SplitKConfig

#: First compute capability with programmatic dependent launch.
PDL_CAPABILITY = (9, 0)

#: Widest stage whose rows a one-shot program keeps in registers without losing to the copy engine.
ONE_SHOT_CHANNELS = 128

#: The same for proj, which has C columns alone: 1.9 to 2.2 us against 2.9 to 3.9 (H200).
ONE_SHOT_PROJ_CHANNELS = 512


def small_stage(
    choice: dict[str, str],
    reasons: dict[str, str],
    version: int,
    M: int,
    C: int,
    hidden: int,
    processors: int,
) -> dict[str, LayerTiles]:
    """Take the small forms where the kernels can, unless a table has measured others.

    Args:
        choice, reasons: the stage's forms by layer, changed in place.
        version: 1 or 2 of Swin.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP.
        processors: multiprocessors of the GPU.

    Returns:
        Tiles by layer, where they are not their operator's heuristic.
    """
    launch: dict[str, LayerTiles] = {}
    narrow = C <= ONE_SHOT_CHANNELS and one_shot_blocker(C) is None
    inside = narrow and version == 1  # LayerNorm in front of the product, in its kernel
    cut = split_k_blocker(hidden) is None
    forms = {
        "qkv": "fused" if inside else "tiled",
        "mlp": "split" if inside else "split-k" if cut else "library",
    }
    for layer, form in forms.items():
        if not reasons.get(layer, "").startswith("measured"):
            choice[layer], reasons[layer] = form, f"{M} rows: bound by launches"
    choice["proj"], reasons["proj"] = "fused", f"{M} rows: bound by launches"
    if tiles := _proj_tiles(M, C, processors):
        launch["proj"] = tiles
    if narrow and choice["qkv"] == forms["qkv"]:
        launch["qkv"] = default_one_shot_config(M, 3 * C, C, processors)
    if narrow and choice["mlp"] == forms["mlp"]:
        if C == ONE_SHOT_CHANNELS:
            launch["fc1"] = default_one_shot_config(M, hidden, C, processors)
        if inside and hidden <= 4 * ONE_SHOT_CHANNELS and one_shot_blocker(hidden) is None:
            launch["fc2"] = OneShotConfig(32, 64, 4) if C < 128 else OneShotConfig(64, 64, 8)
    if choice["mlp"] == "split-k":
        config = default_split_k_config(M, C, hidden, processors)
        assert config is not None  # split_k_blocker was asked
        launch["fc2"] = config
    return launch


def _proj_tiles(M: int, C: int, processors: int) -> LaunchConfig | None:
    """Tiles of proj: one-shot up to 512 channels, None for the copy engine's heuristic."""
    if one_shot_blocker(C) is not None or C > ONE_SHOT_PROJ_CHANNELS:
        return None
    if C <= ONE_SHOT_CHANNELS:
        return default_one_shot_config(M, C, C, processors)
    return OneShotConfig(16 if C > 256 else 32, 64, 8 if C == 256 else 4)

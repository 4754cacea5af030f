"""Forms of a stage with few rows, launched programmatically (measured at batch 1).

    V1, C <= 128   LayerNorm inside one-shot GEMMs (qkv, fc1), proj and fc2 one-shot
    V1, wider      LayerNorm, then our GEMMs by the tensor copy engine (qkv, fc1), or fc1 one-shot
                   with LayerNorm behind; proj one-shot up to 512 channels, of 64 rows further; fc2
                   cut along K, joined by the next LayerNorm (ops/split_k)
    V2             our GEMMs without LayerNorm; proj's branch normed onto the stream, fc2 cut along
                   K and joined with its norm

The library's GEMMs take part in no programmatic launch and ask for their weights only once the
kernel before them has drained: 3.1 to 3.4 us where ours takes 1.9 to 3.9 for proj.
"""

from __future__ import annotations

from fastswin.ops.attention_half.config import AttentionHalfConfig
from fastswin.ops.attention_half.hopper_config import (
    HopperHeadsConfig,
    HopperWholeConfig,
    HopperWindowsConfig,
)
from fastswin.ops.cluster_linear.config import ClusterLinearConfig
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.linear.config import (
    GemmConfig,
    OneShotConfig,
    default_one_shot_config,
    one_shot_blocker,
)
from fastswin.ops.split_k.config import SplitKConfig, default_split_k_config, split_k_blocker
from fastswin.ops.window_attention.hopper_config import HopperAttentionConfig
from fastswin.tuning.problem import LaunchConfig

#: Tiles of one layer in a plan.
LayerTiles = (
    LaunchConfig
    | AttentionHalfConfig
    | SplitKConfig
    | ClusterLinearConfig
    | ClusterMlpConfig
    | HopperHeadsConfig
    | HopperWholeConfig
    | HopperWindowsConfig
    | HopperAttentionConfig
)

#: Widest stage whose rows a one-shot program keeps in registers without losing to the copy engine.
ONE_SHOT_CHANNELS = 128

#: The same for proj, which has C columns alone: 1.9 to 2.2 us against 2.9 to 3.9 (H200).
ONE_SHOT_PROJ_CHANNELS = 512


#: By (version, layer, channels of the stage), up to how many rows which tiles replace the
#: operators' heuristics and, in merging, the library's product; the first with room is taken, None
#: leaves the heuristic. Most are products without a loop over K (ops/linear/one_shot.py). Where
#: whole models gained with them, or a chain of the layer did and no model lost.
SMALL_TILES: dict[tuple[int, str, int], tuple[tuple[int, LayerTiles | None], ...]] = {
    (1, "qkv", 96): ((3136, OneShotConfig(64, 64, 4)),),
    (1, "fc1", 96): ((3136, OneShotConfig(64, 64, 4)),),
    (1, "fc1", 192): ((1024, OneShotConfig(64, 64, 4)),),
    (1, "fc1", 384): (
        (256, OneShotConfig(64, 64, 4)),
        (1024, GemmConfig(64, 64, 64, num_warps=4, num_stages=4, tma=True)),
    ),
    (1, "fc1", 512): ((256, OneShotConfig(64, 64, 8)),),
    (1, "fc1", 768): (
        (64, None),
        (256, GemmConfig(64, 64, 128, num_warps=4, num_stages=3, tma=True)),
    ),
    (1, "fc2", 384): ((256, SplitKConfig(3, 64, 64, num_warps=8)),),
    (1, "fc2", 512): ((256, SplitKConfig(8, 64, 64, num_warps=8)),),
    (1, "fc2", 768): ((64, None), (256, SplitKConfig(6, 64, 128, num_warps=8))),
    (1, "proj", 512): ((256, OneShotConfig(32, 64, 8)),),
    (1, "proj", 768): ((64, OneShotConfig(16, 64, 8)),),
    (1, "proj", 1024): ((64, OneShotConfig(16, 64, 8)),),
    (1, "merge", 128): ((3136, OneShotConfig(64, 64, 8)),),
    (1, "merge", 256): ((1024, OneShotConfig(64, 32, 8)),),
    (2, "fc1", 96): ((4096, OneShotConfig(64, 64, 4)),),
    (2, "fc1", 192): ((1024, OneShotConfig(64, 64, 4)),),
    (2, "fc1", 384): ((256, OneShotConfig(64, 64, 4)),),
    (2, "fc1", 512): ((256, OneShotConfig(64, 64, 8)),),
    (2, "proj", 768): ((64, OneShotConfig(16, 64, 8)),),
}

#: Channels whose second LayerNorm stands behind fc1's one-shot product (V1).
NORM_BEHIND: frozenset[int] = frozenset((192, 384, 512))


def second_norm(version: int, choice: dict[str, str], launch: dict[str, LayerTiles], C: int) -> str:
    """The plan's word for norm2: "behind" where proj can tell fc1 its rows' statistics."""
    proj, fc1 = launch.get("proj"), launch.get("fc1")
    able = (
        version == 1
        and choice["mlp"] == "split-k"
        and choice["proj"] == "fused"
        and isinstance(proj, OneShotConfig)
        and isinstance(fc1, OneShotConfig)
        and C % proj.block_n == 0
    )
    return "behind" if able and C in NORM_BEHIND else "apart"


def small_stage(
    choice: dict[str, str],
    reasons: dict[str, str],
    version: int,
    M: int,
    C: int,
    hidden: int,
    processors: int,
) -> dict[str, LayerTiles]:
    """Take the small forms where the kernels can.

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
        choice[layer], reasons[layer] = form, f"{M} rows: bound by launches"
    choice["proj"], reasons["proj"] = "fused", f"{M} rows: bound by launches"
    if proj := _proj_tiles(M, C, processors):
        launch["proj"] = proj
    if narrow:
        launch["qkv"] = default_one_shot_config(M, 3 * C, C, processors)
        if C == ONE_SHOT_CHANNELS:
            launch["fc1"] = default_one_shot_config(M, hidden, C, processors)
        if inside and hidden <= 4 * ONE_SHOT_CHANNELS and one_shot_blocker(hidden) is None:
            launch["fc2"] = OneShotConfig(32, 64, 4) if C < 128 else OneShotConfig(64, 64, 8)
    if choice["mlp"] == "split-k":
        config = default_split_k_config(M, C, hidden, processors)
        assert config is not None  # split_k_blocker was asked
        launch["fc2"] = config
    replaced = {
        "qkv": True,
        "proj": True,
        "fc1": choice["mlp"] != "library",
        "fc2": choice["mlp"] == "split-k",
        "merge": choice.get("merge") == "triton",
    }
    for layer, open_to_it in replaced.items():
        ranges = SMALL_TILES.get((version, layer, C), ())
        tiles = next((tiles for most, tiles in ranges if most >= M), None)
        if open_to_it and tiles is not None:
            launch[layer] = tiles
    if "merge" in launch:
        choice["merge"], reasons["merge"] = "tiled", f"{M} rows: bound by launches"
    return launch


def _proj_tiles(M: int, C: int, processors: int) -> LaunchConfig | None:
    """Tiles of proj: one-shot up to 512 channels, None for the copy engine's heuristic."""
    if one_shot_blocker(C) is not None or C > ONE_SHOT_PROJ_CHANNELS:
        return None
    if C <= ONE_SHOT_CHANNELS:
        return default_one_shot_config(M, C, C, processors)
    return OneShotConfig(16 if C > 256 else 32, 64, 8 if C == 256 else 4)

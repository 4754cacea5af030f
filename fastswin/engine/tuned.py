"""What a tuning table says about one stage: the form of its layers and the tiles of its kernels.

And about a whole model: what it measured with the table and without (``tuned_gain``).
"""

from __future__ import annotations

import math

from fastswin.models import VARIANTS
from fastswin.models.config import SwinConfig
from fastswin.tuning.layers import (
    LayerProblem,
    fused_mlp,
    fused_qkv,
    mlp_layer,
    qkv_layer,
    split_fc1,
    split_fc2,
    tiled_fc1,
    tiled_qkv,
)
from fastswin.tuning.problem import KernelProblem, LaunchConfig, make_problem
from fastswin.tuning.table import TuningTable

Pair = tuple[int, int]


def tuned_form(
    table: TuningTable | None, layer: LayerProblem, legal: tuple[str, ...]
) -> tuple[str, str] | None:
    """The measured form of a layer and the times that decided, None where the heuristic has to.

    Args:
        table: the card's, or None.
        layer: the problem.
        legal: forms that the kernels can take here.
    """
    found = table.choice(layer) if table is not None else None
    if found is None or found["choice"] not in legal:
        return None
    times = sorted(found["latency_us"].items(), key=lambda item: item[1])
    return found["choice"], "measured: " + ", ".join(f"{form} {us:.1f} us" for form, us in times)


def stage_layers(
    dtype: str, rows: int, channels: int, hidden: int, post_norm: bool
) -> dict[str, LayerProblem]:
    """The layers of one stage that have several forms."""
    return {
        "qkv": qkv_layer(dtype, rows, channels, post_norm),
        "mlp": mlp_layer(dtype, rows, channels, hidden, post_norm),
    }


def stage_kernels(
    dtype: str, rows: int, channels: int, hidden: int, post_norm: bool, qkv: str, mlp: str
) -> dict[str, KernelProblem]:
    """Launches with tiles to choose in one block, by the name of their layer."""
    sized = (dtype, rows, channels, hidden)
    kernels = {
        ("qkv", "fused"): {"qkv": fused_qkv(dtype, rows, channels)},
        ("qkv", "tiled"): {"qkv": tiled_qkv(dtype, rows, channels)},
        ("mlp", "fused"): {"mlp": fused_mlp(*sized, post_norm)},
        ("mlp", "split"): {"fc1": split_fc1(*sized), "fc2": split_fc2(*sized)},
        ("mlp", "library"): {"fc1": tiled_fc1(*sized)},
        ("mlp", "split-k"): {"fc1": tiled_fc1(*sized)},
    }
    return kernels.get(("qkv", qkv), {}) | kernels.get(("mlp", mlp), {})


def attention_kernel(
    dtype: str, batch: int, map_size: Pair, window: Pair, heads: int, head_dim: int, cosine: bool
) -> KernelProblem:
    """The attention launch of one block."""
    windows = batch * math.prod(
        -(-side // length) for side, length in zip(map_size, window, strict=True)
    )
    return make_problem(
        "window_attention", dtype, windows, window_h=window[0], window_w=window[1], heads=heads,
        head_dim=head_dim, cosine=cosine,
    )  # fmt: skip


def tuned_launches(
    table: TuningTable | None, kernels: dict[str, KernelProblem]
) -> dict[str, LaunchConfig]:
    """Tuned tiles by layer; a layer that is missing takes its operator's heuristic."""
    if table is None:
        return {}
    found = {name: table.config(problem) for name, problem in kernels.items()}
    return {name: config for name, config in found.items() if config is not None}


def tuned_gain(
    table: TuningTable | None, config: SwinConfig, batch: int, image_size: Pair, precision: str
) -> str:
    """What a report adds about a model at a batch: its times by heuristics and with the table.

    Args:
        table: the card's, or None.
        config: the engine's model, known to a table by the layers of a named variant.
        batch, image_size: images of a call.
        precision: name of what is computed in.

    Returns:
        Empty where nothing was measured.
    """
    if table is None or image_size != config.image_size:
        return ""
    for row in table.models:
        variant = VARIANTS.get(row.get("model", ""))
        asked = row.get("batch") == batch and row.get("dtype") == precision
        if asked and variant is not None and _same_layers(variant, config):
            before, after = row["heuristic_ms"], row["tuned_ms"]
            return (
                f"; {row['model']} at batch {batch}: {before:.3f} ms by heuristics, {after:.3f} "
                "with it in one run"
            )
    return ""


def _same_layers(a: SwinConfig, b: SwinConfig) -> bool:
    """Whether two models launch the same, but for their heads."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in (
            "version", "image_size", "patch_size", "embed_dim", "depths", "num_heads",
            "window_size", "mlp_ratio",
        )
    )  # fmt: skip

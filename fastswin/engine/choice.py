"""Which form each layer of a stage takes by itself: thresholds, or a tuning table of the card.

The words are those of plan.py. Thresholds are measurements on an H100 (docs/performance.md): rows
``M`` of the batch and channels ``C`` decide between one kernel that keeps values on the chip and
the library's GEMM, which is faster where it is large. What few rows, fp32 products and attention
halves change afterwards is in small_batch.py, tf32.py and fused_attention.py.
"""

from __future__ import annotations

from fastswin.engine.precision import Precision
from fastswin.engine.tuned import (
    attention_kernel,
    stage_kernels,
    stage_layers,
    tuned_form,
    tuned_launches,
)
from fastswin.models.config import SwinConfig
from fastswin.ops.linear.config import layer_norm_linear_blocker
from fastswin.ops.mlp.api import HIDDEN_STEP
from fastswin.ops.mlp.config import mlp_blocker
from fastswin.ops.patch_merging.api import MAX_CHANNELS as MERGE_MAX_CHANNELS
from fastswin.tuning.problem import LaunchConfig
from fastswin.tuning.table import TuningTable

Pair = tuple[int, int]

#: Most tokens for which LayerNorm inside the qkv GEMM beats LayerNorm + library, by channels.
FUSED_QKV_TOKENS = {128: 1 << 62, 192: 6500, 384: 200}

#: Widest stage that the fused (or, below FUSED_MLP_MIN_TOKENS, split) MLP serves.
FUSED_MLP_CHANNELS = 192

#: Fewest tokens that fill the card with the fused MLP's row blocks.
FUSED_MLP_MIN_TOKENS = 4096


def tuned_launch(
    config: SwinConfig,
    stage: int,
    batch: int,
    image_size: Pair,
    precision: Precision,
    choice: dict[str, str],
    table: TuningTable | None,
) -> dict[str, LaunchConfig]:
    """Tiles that a table has for the kernels of a stage's forms, by layer.

    Args:
        config, stage: the model's, and which of its stages.
        batch, image_size: images of a call.
        precision: what is computed in.
        choice: the stage's words.
        table: measurements, or None.
    """
    H, W = config.map_size(stage, image_size)
    C, hidden, post_norm = config.dim(stage), config.hidden_dim(stage), config.version == 2
    kernels = {}
    if precision.half:
        kernels = stage_kernels(
            precision.name, batch * H * W, C, hidden, post_norm, choice["qkv"], choice["mlp"]
        )
    if choice["attention"] == "triton":
        kernels["attention"] = attention_kernel(
            precision.name, batch, (H, W), config.stage_window(stage), config.num_heads[stage],
            config.head_dim(stage), post_norm,
        )  # fmt: skip
    return tuned_launches(table, kernels)


def choose_forms(
    config: SwinConfig,
    stage: int,
    M: int,
    precision: Precision,
    table: TuningTable | None,
    hopper_qkv: bool = False,
) -> tuple[dict[str, str], dict[str, str]]:
    """Words of plan.py for every layer of a stage, and reasons for what is not the fastest form.

    Args:
        config, stage: the model's, and which of its stages.
        M: tokens of the batch in this stage.
        precision: what is computed in.
        table: measurements, or None.
        hopper_qkv: whether qkv as a plain product is ours (ops/hopper_gemm), not the library's.
    """
    C = config.dim(stage)
    choice = {"attention": "triton", "merge": "triton"}
    reasons: dict[str, str] = {}
    if C > MERGE_MAX_CHANNELS:
        choice["merge"] = "reference"
        reasons["merge"] = f"{C} channels exceed the kernel's {MERGE_MAX_CHANNELS}"
    if config.head_dim(stage) > 128:
        choice["attention"] = "reference"
        reasons["attention"] = f"head_dim {config.head_dim(stage)} exceeds the kernel's 128"
    if not precision.half:
        why = f"{precision.name} products are fastest in the library"
        return choice | dict.fromkeys(("qkv", "proj", "mlp"), "library"), reasons | {"gemm": why}
    choice["proj"] = "library"
    post_norm = config.version == 2
    _choose_qkv(choice, reasons, C, M, post_norm)
    if hopper_qkv and choice["qkv"] == "library":
        choice["qkv"], reasons["qkv"] = "tiled", "the Hopper product is faster than the library's"
    _choose_mlp(choice, reasons, C, M, config.hidden_dim(stage), post_norm)
    layers = stage_layers(precision.name, M, C, config.hidden_dim(stage), post_norm)
    for name, layer in layers.items():
        if found := tuned_form(table, layer, tuple(layer.forms())):
            choice[name], reasons[name] = found
    return choice, reasons


def _choose_qkv(
    choice: dict[str, str], reasons: dict[str, str], C: int, M: int, post_norm: bool
) -> None:
    choice["qkv"] = "library"
    limit = next((most for widest, most in FUSED_QKV_TOKENS.items() if C <= widest), 0)
    if post_norm:
        reasons["qkv"] = "V2 has no LayerNorm in front of qkv"
    elif blocker := layer_norm_linear_blocker(C):
        reasons["qkv"] = blocker
    elif limit < M:
        reasons["qkv"] = f"{M} rows of {C} channels: LayerNorm + library GEMM is faster"
    else:
        choice["qkv"] = "fused"


def _choose_mlp(
    choice: dict[str, str], reasons: dict[str, str], C: int, M: int, hidden: int, post_norm: bool
) -> None:
    choice["mlp"] = "library"
    if blocker := mlp_blocker(C, hidden, HIDDEN_STEP):
        reasons["mlp"] = blocker
    elif C > FUSED_MLP_CHANNELS:
        reasons["mlp"] = f"{C} channels: two GEMMs are faster"
    elif M >= FUSED_MLP_MIN_TOKENS:
        choice["mlp"] = "fused"
    elif post_norm:
        reasons["mlp"] = "V2 at few rows: the library fills the card better"
    else:
        choice["mlp"] = "split"
        reasons["mlp"] = f"{M} rows: one program per row block would leave the card idle"

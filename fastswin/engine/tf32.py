"""Which products of a tf32 engine are ours: those that save a pass over fp32 values.

    "fc1"  GELU in the product: a pass of its own reads and writes the hidden map, 8 M hidden bytes
    "mlp"  LayerNorm, fc1, GELU, fc2 and residual in one kernel: 32 M C bytes less than apart
    "qkv"  LayerNorm in the product: 8 M C bytes less

The library keeps proj, fc2, merging's product and the head, which have nothing in front or behind
that a pass is needed for. fp32 keeps all of them: in Triton its products are chains of K
multiply-adds, outside the gate.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastswin._triton.device import device_capability
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    layer_norm_linear_blocker,
)
from fastswin.ops.mlp.api import HIDDEN_STEP
from fastswin.ops.mlp.config import MlpConfig, mlp_blocker

#: Fewest rows and tiles by (word, channels).
Tf32Products = Mapping[tuple[str, int], tuple[int, GemmConfig | MlpConfig | LayerNormLinearConfig]]

#: First compute capabilities whose copy engine the tiles are for.
TF32_CAPABILITIES = (9, 10)

#: What is taken; nothing before a whole model has been faster with it.
TF32_PRODUCTS: Tf32Products = {}


def choose_tf32_products(
    table: Tf32Products,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict,
    *,
    version: int,
    M: int,
    C: int,
    hidden: int,
    device: torch.device,
) -> None:
    """Write the words and tiles of a stage's products into its plan.

    Args:
        table: measured forms.
        choice, reasons, launch: the stage's, changed in place; all products are the library's.
        version: of the model; V2 has no LayerNorm in front of qkv.
        M, C, hidden: rows of the batch, channels and hidden channels of the stage.
        device: where it runs.
    """
    choice["mlp"] = "unfused"
    if device_capability(device)[0] not in TF32_CAPABILITIES:
        return

    def take(layer: str, word: str, at: str) -> bool:
        fewest, tiles = table.get((layer, C), (0, None))
        if tiles is None or fewest > M:
            return False
        choice[at], launch[layer] = word, tiles
        reasons[at] = f"{word} by our kernel: a pass over fp32 values less"
        return True

    if version == 1 and layer_norm_linear_blocker(C) is None:
        take("qkv", "fused", "qkv")
    if mlp_blocker(C, hidden, HIDDEN_STEP) is not None or not take("mlp", "fused", "mlp"):
        take("fc1", "library", "mlp")

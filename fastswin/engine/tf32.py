"""Which products of fp32 operands are ours: in tf32 those that save a pass over fp32 values.

    "fc1"  GELU in the product: a pass of its own reads and writes the hidden map, 8 M hidden bytes
    "mlp"  LayerNorm, fc1, GELU, fc2 and residual in one kernel: 32 M C bytes less than apart
    "qkv"  LayerNorm in the product: 8 M C bytes less

The library keeps proj, fc2, merging's product and the head, which have nothing in front or behind
that a pass is needed for.

In fp32 chains of K multiply-adds would be outside the gate, but a product of fp32 numbers is also
three of TF32: each operand is the sum of two TF32 numbers, and what is left out is below
``2**-21`` of it. Summed by tensor cores that is 1.3 to 4.5 times closer to fp64 than the library's
fp32 (rms, K from 96 to 3,072) in half of its time (docs/performance.md, H200).
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

#: Fewest rows and tiles by (version, word, channels).
Tf32Products = Mapping[
    tuple[int, str, int], tuple[int, GemmConfig | MlpConfig | LayerNormLinearConfig]
]

#: First compute capabilities whose copy engine the tiles are for.
TF32_CAPABILITIES = (9, 10)

#: What is taken (H200, batch 32: 122, 151, 114 and 68 us where the passes apart take 222, 287, 144
#: and 75). qkv of 128 and 192 channels is slower so; fc1 apart was not measured.
TF32_PRODUCTS: Tf32Products = {
    (1, "mlp", 96): (20_000, MlpConfig(128, 64, num_warps=8, num_stages=2, tma=True)),
    (1, "mlp", 128): (20_000, MlpConfig(64, 32, num_warps=4, num_stages=2, tma=True)),
    (1, "mlp", 192): (20_000, MlpConfig(64, 32, num_warps=4, num_stages=2, tma=True)),
    (1, "qkv", 96): (20_000, LayerNormLinearConfig(64, 32, 1, num_warps=4, num_stages=3)),
}

#: Fewest values (rows x channels) of a stage whose fp32 products are three of TF32, None for none,
#: and their tiles.
SPLIT_VALUES: int | None = 1_000_000
SPLIT_TILES = GemmConfig(64, 64, 32, num_warps=4, num_stages=3, tma=True)


def splits_fp32(M: int, C: int, hidden: int, device: torch.device) -> bool:
    """Whether a stage of an fp32 engine multiplies in three TF32 products.

    The copy engine takes rows of a multiple of 16 bytes.
    """
    fast = device_capability(device)[0] in TF32_CAPABILITIES and (C | hidden) % 4 == 0
    return fast and SPLIT_VALUES is not None and M * C >= SPLIT_VALUES


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
        fewest, tiles = table.get((version, layer, C), (0, None))
        if tiles is None or fewest > M:
            return False
        choice[at], launch[layer] = word, tiles
        reasons[at] = f"{word} by our kernel: a pass over fp32 values less"
        return True

    if version == 1 and layer_norm_linear_blocker(C) is None:
        take("qkv", "fused", "qkv")
    if mlp_blocker(C, hidden, HIDDEN_STEP) is not None or not take("mlp", "fused", "mlp"):
        take("fc1", "library", "mlp")

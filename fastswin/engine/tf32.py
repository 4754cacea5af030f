"""Which products of fp32 operands are ours: in tf32 those that save a pass over fp32 values.

    "fc1"  GELU in the product: a pass of its own reads and writes the hidden map, 8 M hidden bytes
    "mlp"  LayerNorm, fc1, GELU, fc2 and residual in one kernel: 32 M C bytes less than apart
    "qkv"  LayerNorm in the product: 8 M C bytes less

The library keeps proj, fc2, merging's product and the head, which have nothing in front or behind
that a pass is needed for. The Hopper product cuts its rows off, so it needs a norm in front (V1).

In fp32 chains of K multiply-adds would be outside the gate, but a product of fp32 numbers is also
three of TF32: each operand is the sum of two TF32 numbers, and what is left out is below
``2**-21`` of it. Summed by tensor cores that is 1.3 to 4.5 times closer to fp64 than the library's
fp32 (rms, K from 96 to 3,072) in half of its time; attention's, of 32 and 64 terms, have 1.25 times
eager's error in 0.4 of the time of IEEE products (docs/performance.md, H200). An infinite or NaN
operand gives what it gives in fp32: Triton drops the two small products where they are NaN. One
above 3.4019e38, the largest that TF32 does not round to infinity, counts as infinite.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fastswin._triton.device import device_capability
from fastswin.ops.hopper_gemm.config import HopperGemmConfig, why_no_hopper_gemm
from fastswin.ops.linear.api import InputPrecision
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    layer_norm_linear_blocker,
)
from fastswin.ops.mlp.api import HIDDEN_STEP
from fastswin.ops.mlp.config import MlpConfig, mlp_blocker

#: Fewest rows and tiles by (version, word, channels).
Tf32Products = Mapping[
    tuple[int, str, int],
    tuple[int, GemmConfig | MlpConfig | LayerNormLinearConfig | HopperGemmConfig],
]

#: First compute capabilities whose copy engine the tiles are for.
TF32_CAPABILITIES = (9, 10)

#: fc1 with GELU, rows rounded on their way through registers; and fc1 or qkv of rows that the norm
#: in front has rounded already, which V1 has.
FC1_TILES = GemmConfig(128, 128, 32, num_warps=8, num_stages=3, tma=True)
ROUNDED_TILES = HopperGemmConfig(128, 128, 32, stages=5, warps=4, bias_first=False)

#: What is taken (H200, batch 32). MLP: 122, 151 and 114 us where the passes apart take 222, 287 and
#: 144. qkv of 96 channels: 68 for 75; of 128 and 192 it is slower so. V1 from 256 channels, rows
#: rounded by the norm: fc1 with GELU 53, 31, 42, 32 and 50 us where the library's plain product
#: takes 56, 32, 45, 31 and 59, qkv 40, 23, 35 and 39 for 44, 31, 38 and 45 (256, 384, 512, 1,024).
#: V2's fc1, through registers: 73, 41, 54, 40 and 58 for 104, 51, 70, 42 and 73 with GELU apart,
#: and of 128 and 192 channels, where its MLP would spill, 113 and 52 for 178 and 77. Rows are the
#: fewest measured.
TF32_PRODUCTS: Tf32Products = {
    (1, "mlp", 96): (20_000, MlpConfig(128, 64, num_warps=8, num_stages=2, tma=True)),
    (1, "mlp", 128): (20_000, MlpConfig(64, 32, num_warps=4, num_stages=2, tma=True)),
    (1, "mlp", 192): (20_000, MlpConfig(64, 32, num_warps=4, num_stages=2, tma=True)),
    (2, "mlp", 96): (20_000, MlpConfig(128, 64, num_warps=8, num_stages=2, tma=True)),
    (1, "qkv", 96): (20_000, LayerNormLinearConfig(64, 32, 1, num_warps=4, num_stages=3)),
    **{(2, "fc1", C): (20_000, FC1_TILES) for C in (128, 192, 256)},
    **{(2, "fc1", C): (6_000, FC1_TILES) for C in (384, 512)},
    **{(2, "fc1", C): (1_500, FC1_TILES) for C in (768, 1024)},
    **{(1, layer, 256): (20_000, ROUNDED_TILES) for layer in ("fc1", "qkv")},
    **{(1, "fc1", C): (1_500, ROUNDED_TILES) for C in (384, 512, 768, 1024)},
    **{(1, "qkv", C): (6_000, ROUNDED_TILES) for C in (384, 512)},
    **{(1, "qkv", C): (1_500, ROUNDED_TILES) for C in (768, 1024)},
}

#: Fewest values (rows x channels) of a stage whose fp32 products are three of TF32, None for none,
#: and their tiles.
SPLIT_VALUES: int | None = 1_000_000
SPLIT_TILES = GemmConfig(64, 64, 32, num_warps=4, num_stages=3, tma=True)

#: Longest window whose attention's products are split in those stages: windows of 49, 64, 144 and
#: 256 tokens take 0.40, 0.37, 0.40 and 0.34 of the time of IEEE products (H200).
SPLIT_WINDOW = 256

#: Whether the patch embedding's product, in fp32 and tf32, is three of TF32: 36 us for 32 images
#: and 96 channels instead of 170. One of TF32 saves 5 us more and would round the model's input.
SPLIT_EMBED = True


def splits_fp32(M: int, C: int, hidden: int, device: torch.device) -> bool:
    """Whether a stage of an fp32 engine multiplies in three TF32 products.

    The copy engine takes rows of a multiple of 16 bytes.
    """
    fast = device_capability(device)[0] in TF32_CAPABILITIES and (C | hidden) % 4 == 0
    return fast and SPLIT_VALUES is not None and M * C >= SPLIT_VALUES


def splits_attention(tokens: int) -> bool:
    """Whether attention of such windows multiplies in three TF32 products with its stage's."""
    return tokens <= SPLIT_WINDOW


def embed_products(device: torch.device) -> InputPrecision | None:
    """Of what the patch embedding's fp32 product is made; None multiplies in IEEE."""
    fast = device_capability(device)[0] in TF32_CAPABILITIES
    return "tf32x3" if SPLIT_EMBED and fast else None


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
        if isinstance(tiles, HopperGemmConfig):
            columns = hidden if layer == "fc1" else 3 * C
            missing = why_no_hopper_gemm(device, torch.float32, columns, C, tf32=True)
            if missing is not None and layer != "fc1":
                return False
            tiles = FC1_TILES if missing is not None else tiles
        choice[at], launch[layer] = word, tiles
        reasons[at] = f"{word} by our kernel: a pass over fp32 values less"
        return True

    _, qkv = table.get((version, "qkv", C), (0, None))
    if version == 1 and isinstance(qkv, HopperGemmConfig):
        take("qkv", "tiled", "qkv")
    elif version == 1 and layer_norm_linear_blocker(C) is None:
        take("qkv", "fused", "qkv")
    if mlp_blocker(C, hidden, HIDDEN_STEP) is not None or not take("mlp", "fused", "mlp"):
        take("fc1", "library", "mlp")

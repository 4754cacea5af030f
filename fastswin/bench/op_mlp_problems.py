"""The problems of the MLP suite: stages of named variants whose MLP half is one kernel.

    x, out [M, C]    fc1 [4 C, C] and its bias [4 C]    fc2 [C, 4 C] and its bias [C]

V1 ``x + fc2(gelu(fc1(norm(x))))``, the norm's affine folded into fc1; V2
``x + norm(fc2(gelu(fc1(x))))``. 16 M C**2 FLOPs; one kernel reads and writes the rows once and
reads 8 C**2 weights. Up to 256 channels there is such a kernel for any number of rows, above for
few rows, in clusters of programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fastswin._triton.device import device_capability
from fastswin.bench.roofline import Ceilings
from fastswin.engine.stage_choice import SMALL_STAGE_VALUES
from fastswin.models import find_variant
from fastswin.ops.cluster_mlp.config import (
    ClusterMlpConfig,
    config_blocker,
    default_cluster_mlp_config,
    why_no_cluster_mlp,
)
from fastswin.ops.hopper_resident.config import chosen_mlp
from fastswin.ops.mlp.api import HIDDEN_STEP, Config
from fastswin.ops.mlp.config import default_mlp_config, mlp_blocker
from fastswin.ops.streamed_mlp.config import chosen_streamed_mlp

EPS = 1e-5

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

SWIN_T, SWIN_B = "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224"
SWIN_L, SWIN_V2_T = "swin_large_patch4_window7_224", "swinv2_tiny_window8_256"
SWIN_V2_B = "swinv2_base_window8_256"

#: Swin-S has the stages of Swin-T.
MODELS = (SWIN_T, SWIN_B, SWIN_L, SWIN_V2_T, SWIN_V2_B)
BATCHES = (1, 8, 32)

#: Models and batches that are measured in bf16, too.
BF16 = ((SWIN_T, 8), (SWIN_V2_T, 32))

Norm = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of one call in one dtype; ``norm`` is weight and bias of V2's, None in V1."""

    x: torch.Tensor
    fc1_weight: torch.Tensor
    fc1_bias: torch.Tensor
    fc2_weight: torch.Tensor
    fc2_bias: torch.Tensor
    norm: Norm | None

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""
        return Inputs(
            self.x.to(dtype), self.fc1_weight.to(dtype), self.fc1_bias.to(dtype),
            self.fc2_weight.to(dtype), self.fc2_bias.to(dtype),
            None if self.norm is None else (self.norm[0].to(dtype), self.norm[1].to(dtype)),
        )  # fmt: skip


def eager(inputs: Inputs) -> torch.Tensor:
    """The formula as people write it, in the inputs' dtype."""
    x, C = inputs.x, inputs.x.shape[-1]
    h = F.layer_norm(x, (C,), eps=EPS) if inputs.norm is None else x
    h = F.gelu(F.linear(h, inputs.fc1_weight, inputs.fc1_bias))
    h = F.linear(h, inputs.fc2_weight, inputs.fc2_bias)
    return x + (h if inputs.norm is None else F.layer_norm(h, (C,), *inputs.norm, eps=EPS))


@dataclasses.dataclass(frozen=True)
class MlpProblem:
    """One row of the suite.

    Attributes:
        stage: model and stage, in the name of records.
        batch: images.
        rows: tokens of the batch, M.
        channels: C; there are four times as many hidden units.
        version: of Swin, 1 or 2.
        dtype: key of :data:`DTYPES`.
    """

    stage: str
    batch: int
    rows: int
    channels: int
    version: int
    dtype: str = "fp16"

    @property
    def case(self) -> str:
        """Its name in records and on the command line."""
        return f"{self.stage}_{self.rows}x{self.channels}"

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return 4 * self.channels

    @property
    def flops(self) -> int:
        """Of both products."""
        return 4 * self.rows * self.channels * self.hidden

    @property
    def live_bytes(self) -> int:
        """Rows read and written once, weights read once."""
        values = 2 * self.rows * self.channels + 2 * self.channels * self.hidden
        return values * DTYPES[self.dtype].itemsize

    def floor_ms(self, ceilings: Ceilings) -> float:
        """Roofline of one call, by the copy rate and the one product rate of a run."""
        (gemm_tflops,) = ceilings.gemm_tflops.values()
        return max(self.flops / gemm_tflops, self.live_bytes / ceilings.copy_tbs) * 1e-9

    def make(self, device: torch.device, seed: int) -> Inputs:
        """Random inputs, rows with a mean; the same for one seed on one device type."""
        generator = torch.Generator(device).manual_seed(seed)
        C, hidden = self.channels, self.hidden

        def randn(*shape: int, spread: float = 1.0, mean: float = 0.0) -> torch.Tensor:
            values = torch.randn(*shape, device=device, generator=generator)
            return (spread * values + mean).to(DTYPES[self.dtype])

        return Inputs(
            randn(self.rows, C, spread=1.5, mean=0.5), randn(hidden, C, spread=C**-0.5),
            randn(hidden, spread=0.5), randn(C, hidden, spread=hidden**-0.5),
            randn(C, spread=0.5),
            None if self.version == 1 else (randn(C, spread=0.2, mean=1.0), randn(C, spread=0.2)),
        )  # fmt: skip

    def tiles(self, device: torch.device) -> Config | None:
        """What ``ops.mlp`` takes on a GPU, tiles in clusters where it has none; None on a CPU."""
        if device.type != "cuda":
            return None
        M, C, dtype = self.rows, self.channels, DTYPES[self.dtype]
        if mlp_blocker(C, self.hidden, HIDDEN_STEP) is not None:
            return default_cluster_mlp_config(M, C)
        return (
            chosen_mlp(M, self.hidden, C, dtype, device)
            or chosen_streamed_mlp(M, self.hidden, C, dtype, device)
            or default_mlp_config(C, device_capability(device))
        )

    def blocker(self, device: torch.device) -> str | None:
        """Reason why a GPU has no kernel for it, None where it has one and on a CPU."""
        if isinstance(self.tiles(device), ClusterMlpConfig):
            return why_no_cluster_mlp(device, DTYPES[self.dtype])
        return None

    def launched_ahead(self, device: torch.device) -> bool:
        """Whether the engine launches such a stage programmatically: few rows, and clusters."""
        few = self.rows * self.channels <= SMALL_STAGE_VALUES
        return few or isinstance(self.tiles(device), ClusterMlpConfig)


def has_kernel(rows: int, channels: int) -> bool:
    """Whether one kernel takes the MLP half, on the card that has them all."""
    if mlp_blocker(channels, 4 * channels, HIDDEN_STEP) is None:
        return True
    tiles = default_cluster_mlp_config(rows, channels)
    return tiles is not None and config_blocker(tiles, rows, channels, 4 * channels) is None


def stages(model: str, batch: int, dtype: str) -> Iterator[MlpProblem]:
    """The stages of a model at a batch whose MLP half is one kernel."""
    config = find_variant(model)
    for stage in range(config.num_stages):
        rows, channels = batch * math.prod(config.map_size(stage)), config.dim(stage)
        if has_kernel(rows, channels):
            name = f"{model}.stage{stage + 1}"
            yield MlpProblem(name, batch, rows, channels, config.version, dtype)


#: fp16 first: a short deadline ends anywhere.
PROBLEMS: tuple[MlpProblem, ...] = (
    *(problem for model in MODELS for batch in BATCHES for problem in stages(model, batch, "fp16")),
    *(problem for model, batch in BF16 for problem in stages(model, batch, "bf16")),
)

"""Attention halves of Swin stages: tiles to try for either form, and their compilation ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fastswin.bench.compile_ahead import compile_launches
from fastswin.models import find_variant
from fastswin.ops.attention_half.config import (
    AttentionHalfConfig,
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
    row_tile,
)

SWIN_T, SWIN_B = "swin_tiny_patch4_window7_224", "swin_base_patch4_window7_224"
SWIN_V2_T, SWIN_L = "swinv2_tiny_window8_256", "swin_large_patch4_window7_224"

#: Most windows of the form by heads, fewest of the form by windows.
MOST_WINDOWS, FEWEST_WINDOWS = 512, 64

#: Widest stage of the form by windows that is worth its time here.
WHOLE_CHANNELS = 192


@dataclasses.dataclass(frozen=True)
class Half:
    """The attention half of the second (shifted) block of a stage, at a batch."""

    model: str
    stage: int
    batch: int

    @property
    def channels(self) -> int:
        return find_variant(self.model).dim(self.stage)

    @property
    def windows(self) -> int:
        config = find_variant(self.model)
        (H, W), (h, w) = config.map_size(self.stage), config.stage_window(self.stage)
        return self.batch * (-(-H // h)) * (-(-W // w))

    def __str__(self) -> str:
        return (
            f"{self.model.split('_patch')[0]} stage {self.stage + 1} b{self.batch} "
            f"(C {self.channels}, {self.windows} windows)"
        )


#: The most telling first: a short deadline ends anywhere.
HALVES = tuple(
    Half(model, stage, batch)
    for model, batch, stages in (
        (SWIN_T, 1, (2,)),
        (SWIN_T, 32, (0,)),
        (SWIN_T, 1, (3, 1, 0)),
        (SWIN_T, 32, (1,)),
        (SWIN_B, 32, (0,)),
        (SWIN_B, 1, (2, 3, 0, 1)),
        (SWIN_T, 8, (0, 2, 3, 1)),
        (SWIN_V2_T, 32, (0,)),
        (SWIN_V2_T, 1, (2, 3, 0, 1)),
        (SWIN_T, 64, (0, 1)),
        (SWIN_B, 8, (0, 2, 3, 1)),
        (SWIN_B, 64, (0,)),
        (SWIN_V2_T, 8, (0, 1, 2, 3)),
        (SWIN_V2_T, 64, (0, 1, 2, 3)),
        (SWIN_L, 1, (0, 1, 2, 3)),
        (SWIN_L, 8, (0,)),
        (SWIN_L, 32, (0,)),
    )
    for stage in stages
)

#: (model, batch) of the whole models.
WHOLE_MODELS = (
    (SWIN_T, 1), (SWIN_V2_T, 1), (SWIN_B, 1), (SWIN_V2_T, 8), (SWIN_V2_T, 32), (SWIN_B, 8),
    (SWIN_L, 1), (SWIN_T, 8), (SWIN_T, 32), (SWIN_B, 32), (SWIN_T, 64),
)  # fmt: skip


def candidates(half: Half) -> Iterator[tuple[str, AttentionHalfConfig]]:
    """Forms and tiles, 4 warps throughout: 8 on 64 rows were slow, and faulted (prototypes)."""
    config = find_variant(half.model)
    C, heads = half.channels, config.num_heads[half.stage]
    tokens = config.stage_window(half.stage)[0] * config.stage_window(half.stage)[1]
    found: list[tuple[str, AttentionHalfConfig]] = []
    if half.windows <= MOST_WINDOWS:
        sizes = ((32, 3), (64, 2), (64, 3), (64, 5), (128, 2), (128, 3), (128, 4))
        found += [("heads", HeadsConfig(block_k, 4, stages)) for block_k, stages in sizes]
    if half.windows >= FEWEST_WINDOWS and C <= WHOLE_CHANNELS:
        limits = (0, 168, 128) if C <= 128 else (0,)
        found += [("window", WholeWindowConfig(4, 2, False, most)) for most in limits]
        found += [("window", WholeWindowConfig(4, stages, True)) for stages in (2, 3)]
    for form, tiles in dict.fromkeys(found):
        if attention_half_blocker(C, heads, tokens, form == "window", 0, tiles) is None:
            yield form, tiles


@dataclasses.dataclass(frozen=True)
class Job:
    """What decides a binary: the stage's shapes (not the batch), the form, its tiles and flags.

    ``normed`` rows come from the kernel that joins an fc2 cut along K.
    """

    model: str
    stage: int
    form: str
    config: AttentionHalfConfig
    pdl: bool
    offset: bool
    half_table: bool
    normed: bool = False


def compile_job(job: Job) -> str | None:
    """Compile in this process, on tensors without data; None, or what went wrong."""
    return compile_launches(lambda: launch_without_data(job))


def launch_without_data(job: Job, dtype: torch.dtype = torch.float16) -> None:
    """Call a form's launcher on meta tensors, as the engine does for one image."""
    from fastswin.ops.attention_half import heads, whole

    config = find_variant(job.model)
    (H, W), window = config.map_size(job.stage), config.stage_window(job.stage)
    C, nH = config.dim(job.stage), config.num_heads[job.stage]
    shifted = (H, W) != tuple(window)
    shift = (window[0] // 2, window[1] // 2) if shifted else (0, 0)
    NP, v2 = row_tile(window[0] * window[1]), config.version == 2

    def empty(*shape: int, to: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=to, device="meta")

    x = empty(1, H, W, C, to=dtype)
    table = torch.float16 if job.half_table else torch.float32
    bias = empty(4 if shifted else 1, nH, NP, NP, to=table)
    head_scale = empty(nH) if v2 else None
    offset = empty(C) if job.offset else None
    pad = empty(3 * C, to=dtype)
    weight = empty(3 * C, C, to=dtype)
    if isinstance(job.config, HeadsConfig):
        heads.heads_attention_fwd(
            x, weight, empty(3, 3 * C), offset, bias, head_scale, pad, 0.2, nH, window, shift,
            None if v2 or job.normed else 1e-5, config=job.config, pdl=job.pdl,
        )  # fmt: skip
        return
    norm = empty(C) if v2 else None
    whole.whole_window_fwd(
        x, weight, empty(3 * C), offset, bias, head_scale, pad, empty(C, C, to=dtype), empty(C),
        norm, norm, 0.2, nH, window, shift, 1e-5, not v2, out=x, config=job.config, pdl=job.pdl,
    )  # fmt: skip

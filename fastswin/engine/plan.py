"""Which implementation each layer takes, decided per batch and image size, as readable data.

The choices per stage (``M`` = tokens in the batch, ``C`` channels), fastest first where it applies:

    qkv    "fused"    LayerNorm inside the GEMM (x-stationary): small C, or small C and M
           "library"  our LayerNorm, then the library's GEMM
           "tiled"    our LayerNorm, then our GEMM: many rows on compute capability 9 (hopper_gemm),
                      or where a tuning table says so
           "clusters" our product of few rows, whose weights wait in shared memory, with V1's
                      LayerNorm behind it (cluster_stage.py)
           "inside"   in attention's kernel
    attn   "block"    the whole block in one kernel, in clusters: few windows (whole_block.py)
           "triton"   shift, partition, bias, mask, softmax in one kernel
           "fused"    LayerNorm (unless a join in front has it) and qkv in it as well
                      (fused_attention.py, hopper_attention.py)
    proj   "fused"    our GEMM with bias and residual: few rows
           "library"  the library's GEMM accumulating onto the residual stream in place; the bias is
                      carried as an offset that the next reader adds (bind.py)
           "inside"   in attention's kernel, with the residual
    mlp    "inside"   in attention's kernel, which is the block's
           "fused"    LayerNorm, fc1, GELU, fc2, residual in one kernel: C <= 192, large M; up to
                      256 where weights stream past rows (streamed_mlp_stage.py), wider in
                      clusters, middle M (cluster_mlp_stage.py)
           "split"    LayerNorm inside fc1's GEMM, then fc2 with residual: small M
           "library"  our LayerNorm, our fc1 with GELU, fc2 by the library in place
           "split-k"  our LayerNorm (in fc1 where its tiles say so), our fc1 with GELU, fc2 cut
                      along K: few rows
           "clusters" fc1 and fc2 by the product that qkv "clusters" is: few rows
           "unfused"  "library" with fc1 by the library and GELU apart: where a table says so,
                      and in tf32 (tf32.py)
    merge  "fused"    2x2 gather, LayerNorm and GEMM in one kernel: never by itself
           "triton"   2x2 gather (+ LayerNorm) kernel, then the library's GEMM
           "tiled"    the same with our GEMM: small batches (small_batch.SMALL_TILES)
    head   "library"  norm and pool in one kernel, then the library's GEMM
           "tiled"    the same with our GEMM: small batches
           "fused"    final norm, pool and head in one kernel: never by itself

Where LayerNorm has the Hopper product behind it (qkv, fc1 of many rows), both are launched ahead
(``ahead``): one round of LayerNorm leaves the card to a product that has set itself up meanwhile.

Small batches are bound by launches: their kernels use programmatic dependent launch
(_triton/pdl.py; ``pdl`` in the plan), and a stage of few rows is built of our kernels where they
are faster then (small_batch.py), whatever a tuning table says: its times are of launches that wait
for each other.

Without Triton every layer takes "reference": plain PyTorch. The thresholds are measurements on an
H100 (docs/performance.md); a tuning table of the card, where there is one, decides instead of them
and brings the kernels' tiles.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin._triton.available import Impl, choose_impl, why_not_triton
from fastswin._triton.device import device_capability, multiprocessor_count
from fastswin.engine.cluster_mlp_stage import ClusterMlps
from fastswin.engine.cluster_stage import ClusterStages, merge_in_clusters
from fastswin.engine.form_tables import form_tables
from fastswin.engine.fused_attention import FUSED_CAPABILITIES, FusedAttention
from fastswin.engine.precision import Precision
from fastswin.engine.stage_choice import Planned, plan_stage
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.engine.tf32 import embed_products
from fastswin.engine.whole_block import WholeBlocks
from fastswin.models.config import SwinConfig
from fastswin.ops.linear.config import OneShotConfig, one_shot_blocker
from fastswin.ops.patch_embed.api import patch_embed_blocker
from fastswin.ops.pool.api import MAX_CHANNELS as POOL_MAX_CHANNELS
from fastswin.tuning.table import TuningTable

Pair = tuple[int, int]

#: Most values (rows x channels) of the first stage of a model that is launched ahead (Swin-L at
#: batch 1; at batch 8 Swin-T took 4 % longer).
PDL_VALUES = 700_000

#: Of a head of few images: its weights are in registers before the pooled rows are there. Swin-L's
#: 1,536 features make its model 7 % slower so.
HEAD_TILES, HEAD_TILES_FEATURES = OneShotConfig(16, 16, 4), 1024


def make_plan(
    config: SwinConfig,
    batch: int,
    image_size: Pair,
    device: torch.device,
    precision: Precision,
    impl: Impl = "auto",
    table: TuningTable | None = None,
    pdl: bool | None = None,
    fused_attention: FusedAttention | None = None,
    whole_blocks: WholeBlocks | None = None,
    cluster_stages: ClusterStages | None = None,
    cluster_mlps: ClusterMlps | None = None,
) -> ModelPlan:
    """Choose implementations.

    Args:
        impl: "reference" takes plain PyTorch everywhere; "triton" raises where no kernel can run.
        table: measured choices of this card; None takes the heuristics.
        pdl: programmatic dependent launch and the small-batch forms; None decides by batch and
            launches so only stages of few rows and, in half precision, LayerNorms with the Hopper
            products behind them; False leaves all of it out.
        fused_attention: stages whose attention half is one kernel, by windows; None takes the
            engine's table where its tiles fit, on compute capability 9 and 10.
        whole_blocks: stages whose blocks are one kernel, by windows; None takes the engine's table
            on compute capability 9.0, where the engine decides about attention halves as well.
        cluster_stages: stages whose products run in clusters, by rows; None as ``whole_blocks``,
            unless ``pdl`` is False.
        cluster_mlps: stages whose MLP half is one kernel of clusters, by rows; None as
            ``cluster_stages``.

    Raises:
        ValueError: a stage's map is smaller than its window (the message names the stage).
        RuntimeError: ``impl="triton"`` cannot run on this device.
    """
    blocked = why_not_triton(device, precision.dtype)
    if choose_impl(impl, "Engine", [blocked]) == "reference":
        blocked = blocked or f"impl={impl!r}"
    H, W = config.map_size(0, image_size)
    values = max(batch, 1) * H * W * config.dim(0)
    by_rows, launched_apart = pdl is None, pdl is False
    capability = device_capability(device)
    # whether a program may take the small forms' tiles, up to 214 KB; in the interpreter any
    small_forms = device.type != "cuda" or capability[0] in FUSED_CAPABILITIES
    if pdl is None:
        pdl = device.type == "cuda" and small_forms and values <= PDL_VALUES
    pdl = pdl and precision.half and not blocked
    forms = form_tables(
        device.type, capability, multiprocessor_count(device), blocked, launched_apart,
        fused_attention, whole_blocks, cluster_stages, cluster_mlps,
    )  # fmt: skip
    shared = Planned(
        config, max(batch, 1), image_size, device, precision, blocked, table, pdl,
        small_forms, by_rows, forms,
    )  # fmt: skip
    stages = tuple(plan_stage(shared, stage) for stage in range(config.num_stages))
    if by_rows:  # a first stage of more rows lost by it: SwinV2-B of window 16 1.5 % at batch 1
        stages = tuple(dataclasses.replace(s, pdl=s.few_rows) for s in stages)
    stages = merge_in_clusters(stages, max(batch, 1))
    ends_ahead = pdl or (by_rows and precision.half and _few_images(stages[-1], batch))
    elements = config.in_channels * config.patch_size**2
    no_embed = blocked or patch_embed_blocker(config.embed_dim, elements)
    no_pool = blocked or config.num_features > POOL_MAX_CHANNELS
    return ModelPlan(
        batch,
        image_size,
        "reference" if no_embed else "triton",
        stages,
        "reference" if no_pool else "triton",
        head="tiled" if ends_ahead else "library",
        head_tiles=(
            HEAD_TILES if ends_ahead and _takes_head_tiles(batch, config.num_features) else None
        ),
        pdl=pdl,
        ends_ahead=ends_ahead,
        embed_products=None if no_embed or precision.half else embed_products(device),
    )


def _few_images(last: StagePlan, batch: int) -> bool:
    """Whether pool and head follow a stage that is launched ahead, and the library's head of so few
    rows takes longer than ours: of one, 1,024 features 7.8 us for 3.8 (H200).
    """
    return last.pdl and batch <= HEAD_TILES.block_m


def _takes_head_tiles(batch: int, features: int) -> bool:
    narrow = features <= HEAD_TILES_FEATURES and one_shot_blocker(features) is None
    return batch <= HEAD_TILES.block_m and narrow

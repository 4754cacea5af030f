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
                      (fused_attention.py)
    proj   "fused"    our GEMM with bias and residual: few rows
           "library"  the library's GEMM accumulating onto the residual stream in place; the bias is
                      carried as an offset that the next reader adds (bind.py)
           "inside"   in attention's kernel, with the residual
    mlp    "inside"   in attention's kernel, which is the block's
           "fused"    LayerNorm, fc1, GELU, fc2, residual in one kernel: C <= 192, large M
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
import math

import torch

from fastswin._triton.available import Impl, choose_impl, why_not_triton
from fastswin._triton.device import device_capability, multiprocessor_count
from fastswin.engine.choice import choose_forms, tuned_launch
from fastswin.engine.cluster_stage import (
    CLUSTER_STAGES,
    ClusterStages,
    choose_clusters,
    merge_in_clusters,
)
from fastswin.engine.fused_attention import (
    FUSED_ATTENTION,
    FUSED_CAPABILITIES,
    FusedAttention,
    choose_fused_attention,
)
from fastswin.engine.precision import Precision
from fastswin.engine.small_batch import (
    LayerTiles,
    second_norm,
    small_stage,
)
from fastswin.engine.stage_plan import ModelPlan, StagePlan
from fastswin.engine.tf32 import (
    TF32_PRODUCTS,
    choose_tf32_products,
    embed_products,
    splits_attention,
    splits_fp32,
)
from fastswin.engine.whole_block import WHOLE_BLOCKS, WholeBlocks, choose_whole_block
from fastswin.models.config import SwinConfig
from fastswin.models.geometry import runtime_shift
from fastswin.ops.hopper_gemm.config import HopperGemmConfig, hopper_reason, measured_config
from fastswin.ops.linear.config import OneShotConfig, one_shot_blocker
from fastswin.ops.patch_embed.api import patch_embed_blocker
from fastswin.ops.pool.api import MAX_CHANNELS as POOL_MAX_CHANNELS
from fastswin.ops.swin_block.config import why_no_clusters
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.tuning.table import TuningTable

Pair = tuple[int, int]

#: Most values (rows x channels) of a stage that is built of one-shot GEMMs (Swin-B at batch 1), and
#: of the first stage of a model that is launched ahead (Swin-L at batch 1; at batch 8 Swin-T took
#: 4 % longer).
SMALL_STAGE_VALUES, PDL_VALUES = 420_000, 700_000

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
    if pdl is None:
        pdl = device.type == "cuda" and _holds_small_forms(device) and values <= PDL_VALUES
    pdl = pdl and precision.half and not blocked
    fused = fused_attention
    if fused is None:
        measured = not blocked and device_capability(device)[0] in FUSED_CAPABILITIES
        fused = FUSED_ATTENTION if measured else {}
    no_clusters = (
        blocked is not None
        or fused_attention is not None
        or why_no_clusters(device.type, device_capability(device)) is not None
    )
    if whole_blocks is None:
        whole_blocks = {} if no_clusters else WHOLE_BLOCKS
    if cluster_stages is None:
        cluster_stages = {} if no_clusters or launched_apart else CLUSTER_STAGES
    stages = tuple(
        _plan_stage(
            config,
            stage,
            batch,
            image_size,
            precision,
            blocked,
            table,
            pdl,
            by_rows,
            device,
            fused,
            whole_blocks,
            cluster_stages,
        )
        for stage in range(config.num_stages)
    )
    if by_rows:  # a first stage of more rows lost by it: SwinV2-B of window 16 1.5 % at batch 1
        stages = tuple(dataclasses.replace(s, pdl=s.few_rows) for s in stages)
    stages = merge_in_clusters(stages, max(batch, 1))
    elements = config.in_channels * config.patch_size**2
    no_embed = blocked or patch_embed_blocker(config.embed_dim, elements)
    no_pool = blocked or config.num_features > POOL_MAX_CHANNELS
    return ModelPlan(
        batch,
        image_size,
        "reference" if no_embed else "triton",
        stages,
        "reference" if no_pool else "triton",
        head="tiled" if pdl else "library",
        head_tiles=HEAD_TILES if pdl and _takes_head_tiles(batch, config.num_features) else None,
        pdl=pdl,
        embed_products=None if no_embed or precision.half else embed_products(device),
    )


def _takes_head_tiles(batch: int, features: int) -> bool:
    narrow = features <= HEAD_TILES_FEATURES and one_shot_blocker(features) is None
    return batch <= HEAD_TILES.block_m and narrow


def _holds_small_forms(device: torch.device) -> bool:
    """Whether a program may take the small forms' tiles, up to 214 KB (the interpreter: any)."""
    return device.type != "cuda" or device_capability(device)[0] in FUSED_CAPABILITIES


def _plan_stage(
    config: SwinConfig,
    stage: int,
    batch: int,
    image_size: Pair,
    precision: Precision,
    blocked: str | None,
    table: TuningTable | None,
    pdl: bool,
    norms_ahead: bool,
    device: torch.device,
    fused_attention: FusedAttention,
    whole_blocks: WholeBlocks,
    cluster_stages: ClusterStages,
) -> StagePlan:
    map_size = config.map_size(stage, image_size)
    window = config.stage_window(stage)
    shift = runtime_shift(map_size, window, config.window_convention, stage=stage)
    C = config.dim(stage)
    last = stage == config.num_stages - 1
    launch: dict[str, LayerTiles] = {}
    few_rows = split = split_attention = ahead = False
    post_norm: tuple[str, ...] | None = None
    if blocked:
        choice = {"qkv": "reference", "attention": "reference", "proj": "reference"}
        choice |= {"mlp": "reference", "merge": "reference"}
        reasons = {"all": blocked}
    else:
        M = max(batch, 1) * map_size[0] * map_size[1]
        few_rows = pdl and M * C <= SMALL_STAGE_VALUES and _holds_small_forms(device)
        measured = None if few_rows else table
        hopper_qkv = None
        if precision.half and not few_rows:
            hopper_qkv = measured_config("plain", M, 3 * C, C, precision.dtype, device)
        choice, reasons = choose_forms(
            config, stage, M, precision, measured, hopper_qkv is not None
        )
        if few_rows:
            if table is not None:
                reasons["tuning"] = f"{M} rows: no table, whose launches are not programmatic"
            launch = small_stage(
                choice, reasons, config.version, M, C, config.hidden_dim(stage),
                multiprocessor_count(device),
            )  # fmt: skip
        launch |= tuned_launch(
            config, stage, max(batch, 1), image_size, precision, choice, measured
        )
        if choice["qkv"] == "tiled" and hopper_qkv is not None:
            launch.setdefault("qkv", hopper_qkv)
        if precision.tf32:
            choose_tf32_products(
                TF32_PRODUCTS, choice, reasons, launch, version=config.version, M=M, C=C,
                hidden=config.hidden_dim(stage), device=device,
            )  # fmt: skip
        exact = not precision.half and not precision.tf32
        split = exact and splits_fp32(M, C, config.hidden_dim(stage), device)
        split_attention = split and splits_attention(math.prod(window))
        if split_attention:  # a table's tiles are of products in fp32
            launch.pop("attention", None)
        if split:
            reasons["gemm"] = "three TF32 products: closer to fp64 than the library's and faster"
        if precision.half:
            windows = max(batch, 1) * math.prod(num_windows(map_size, window))
            heads = config.num_heads[stage]
            choose_whole_block(
                whole_blocks, choice, reasons, launch, version=config.version, C=C,
                num_heads=heads, hidden=config.hidden_dim(stage), window_size=window,
                map_size=map_size, windows=windows,
            )  # fmt: skip
            choose_fused_attention(
                fused_attention, choice, reasons, launch, version=config.version, C=C,
                num_heads=heads, tokens=math.prod(window), windows=windows,
                map_tokens=math.prod(map_size),
            )  # fmt: skip
            post_norm = choose_clusters(
                cluster_stages, choice, reasons, launch, version=config.version, M=M, C=C,
                hidden=config.hidden_dim(stage), num_heads=heads, window_size=window,
                map_size=map_size,
            )  # fmt: skip
            few_rows |= post_norm is not None
            if choice["mlp"] == "library" and "fc1" not in launch:
                hidden = config.hidden_dim(stage)
                reasons |= hopper_reason(M, hidden, C, precision.dtype, device)
                fc1 = measured_config("linear", M, hidden, C, precision.dtype, device)
                if fc1 is not None:
                    launch["fc1"] = fc1
            products = [n for n in ("qkv", "fc1") if isinstance(launch.get(n), HopperGemmConfig)]
            ahead = norms_ahead and not few_rows and bool(products)
            if ahead:
                behind = " and ".join(products)
                reasons["norm"] = f"launched programmatically, and {behind} behind it"
    return StagePlan(
        stage=stage,
        map_size=map_size,
        window_size=window,
        shift_size=shift,
        channels=C,
        num_heads=config.num_heads[stage],
        depth=config.depths[stage],
        qkv=choice["qkv"],
        attention=choice["attention"],
        proj=choice["proj"],
        mlp=choice["mlp"],
        merge=None if last else choice["merge"],
        reasons=reasons,
        launch=launch,
        pdl=pdl,
        norm2="behind"
        if post_norm is not None and config.version == 1
        else second_norm(config.version, choice, launch, C),
        split=split,
        split_attention=split_attention,
        few_rows=few_rows,
        ahead=ahead,
        post_norm=post_norm or (),
    )

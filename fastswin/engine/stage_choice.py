"""One stage of a plan: what the forms of choice.py become where a special form is faster.

In their order: few rows (small_batch.py), a tuning table's tiles, TF32 products (tf32.py), whole
blocks, attention halves, products and MLP halves by the tables of form_tables.py, then
the Hopper product. The words are those of plan.py.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from fastswin._triton.device import multiprocessor_count
from fastswin.engine.choice import choose_forms, tuned_launch
from fastswin.engine.cluster_mlp_stage import choose_cluster_mlp
from fastswin.engine.cluster_stage import choose_clusters
from fastswin.engine.form_tables import FormTables
from fastswin.engine.fused_attention import choose_fused_attention
from fastswin.engine.hopper_attention import (
    choose_long_windows,
    choose_whole,
    choose_windows,
)
from fastswin.engine.precision import Precision
from fastswin.engine.small_batch import second_norm, small_stage
from fastswin.engine.stage_plan import StagePlan
from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.engine.streamed_mlp_stage import choose_streamed_mlp
from fastswin.engine.tf32 import (
    TF32_PRODUCTS,
    choose_tf32_products,
    splits_attention,
    splits_fp32,
)
from fastswin.engine.whole_block import choose_whole_block
from fastswin.models.config import SwinConfig
from fastswin.models.geometry import runtime_shift
from fastswin.ops.hopper_gemm.config import HopperGemmConfig, hopper_reason, measured_config
from fastswin.ops.window_attention.config import takes_compact_bias
from fastswin.ops.window_attention.geometry import num_windows
from fastswin.tuning.table import TuningTable

Pair = tuple[int, int]

#: Most values (rows x channels) of a stage that is built of one-shot GEMMs (Swin-B at batch 1).
SMALL_STAGE_VALUES = 420_000


@dataclasses.dataclass(frozen=True)
class Planned:
    """What all stages of one plan share.

    Attributes:
        config, batch, image_size: the model, and what it is given; at least one image.
        device, precision: where and in what it is computed.
        blocked: why no kernel runs, None where they do.
        table: measured choices of the card, or None.
        pdl: whether launches are programmatic.
        small_forms: whether a program may take the tiles of few rows.
        norms_ahead: whether LayerNorms in front of the Hopper product may be launched ahead.
        forms: tables of the special forms.
    """

    config: SwinConfig
    batch: int
    image_size: Pair
    device: torch.device
    precision: Precision
    blocked: str | None
    table: TuningTable | None
    pdl: bool
    small_forms: bool
    norms_ahead: bool
    forms: FormTables


def plan_stage(plan: Planned, stage: int) -> StagePlan:
    """Choose the forms and tiles of one stage.

    Raises:
        ValueError: its map is smaller than its window.
    """
    config = plan.config
    map_size = config.map_size(stage, plan.image_size)
    window = config.stage_window(stage)
    shift = runtime_shift(map_size, window, config.window_convention, stage=stage)
    C = config.dim(stage)
    if plan.blocked:
        layers = ("qkv", "attention", "proj", "mlp", "merge")
        chosen = Choice(dict.fromkeys(layers, "reference"), {"all": plan.blocked})
    else:
        M = plan.batch * math.prod(map_size)
        chosen = _by_rows(plan, stage, M)
        _full_precision(plan, stage, M, chosen)
        if plan.precision.half:
            _special_forms(plan, stage, M, chosen)
            _hopper_products(plan, stage, M, chosen)
    words = chosen.words
    compact = words["attention"] == "triton" and takes_compact_bias(window, plan.batch)
    if compact:
        chosen.reasons["bias"] = "compact tables, an entry for each distance of rows"
    normed_behind = (
        chosen.post_norm is not None and words["mlp"] == "clusters" and config.version == 1
    )
    return StagePlan(
        stage=stage,
        map_size=map_size,
        window_size=window,
        shift_size=shift,
        channels=C,
        num_heads=config.num_heads[stage],
        depth=config.depths[stage],
        qkv=words["qkv"],
        attention=words["attention"],
        proj=words["proj"],
        mlp=words["mlp"],
        merge=None if stage == config.num_stages - 1 else words["merge"],
        reasons=chosen.reasons,
        launch=chosen.launch,
        pdl=plan.pdl,
        norm2="behind" if normed_behind else second_norm(config.version, words, chosen.launch, C),
        split=chosen.split,
        split_attention=chosen.split_attention,
        few_rows=chosen.few_rows,
        ahead=chosen.ahead,
        post_norm=tuple(layer for layer in chosen.post_norm or () if layer in chosen.launch),
        compact_bias=compact,
    )


def _by_rows(plan: Planned, stage: int, M: int) -> Choice:
    """Forms by thresholds or the table, those of few rows where there are, and their tiles."""
    config, precision, C = plan.config, plan.precision, plan.config.dim(stage)
    few_rows = plan.pdl and M * C <= SMALL_STAGE_VALUES and plan.small_forms
    table = None if few_rows else plan.table
    hopper_qkv = None
    if precision.half and not few_rows:
        hopper_qkv = measured_config("plain", M, 3 * C, C, precision.dtype, plan.device)
    words, reasons = choose_forms(config, stage, M, precision, table, hopper_qkv is not None)
    chosen = Choice(words, reasons, few_rows=few_rows)
    if few_rows:
        if plan.table is not None:
            reasons["tuning"] = f"{M} rows: no table, whose launches are not programmatic"
        chosen.launch = small_stage(
            words, reasons, config.version, M, C, config.hidden_dim(stage),
            multiprocessor_count(plan.device),
        )  # fmt: skip
    chosen.launch |= tuned_launch(
        config, stage, plan.batch, plan.image_size, precision, words, table
    )
    if words["qkv"] == "tiled" and hopper_qkv is not None:
        chosen.launch.setdefault("qkv", hopper_qkv)
    return chosen


def _full_precision(plan: Planned, stage: int, M: int, chosen: Choice) -> None:
    """Products of fp32 numbers: TF32, or three of them."""
    config, precision, C = plan.config, plan.precision, plan.config.dim(stage)
    hidden = config.hidden_dim(stage)
    if precision.tf32:
        choose_tf32_products(
            TF32_PRODUCTS, chosen.words, chosen.reasons, chosen.launch, version=config.version,
            M=M, C=C, hidden=hidden, device=plan.device,
        )  # fmt: skip
    exact = not precision.half and not precision.tf32
    chosen.split = exact and splits_fp32(M, C, hidden, plan.device)
    chosen.split_attention = chosen.split and splits_attention(
        math.prod(config.stage_window(stage))
    )
    if chosen.split_attention:  # a table's tiles are of products in fp32
        chosen.launch.pop("attention", None)
    if chosen.split:
        why = "three TF32 products: closer to fp64 than the library's and faster"
        chosen.reasons["gemm"] = why


def _special_forms(plan: Planned, stage: int, M: int, chosen: Choice) -> None:
    """Whole blocks, attention halves, products and MLP halves, where tables say so."""
    config, forms = plan.config, plan.forms
    map_size, window = config.map_size(stage, plan.image_size), config.stage_window(stage)
    shape = StageShape(
        config.version, M, config.dim(stage), config.num_heads[stage], config.hidden_dim(stage),
        window, map_size, plan.batch * math.prod(num_windows(map_size, window)),
        multiprocessor_count(plan.device),
    )  # fmt: skip
    choose_whole_block(forms.whole_blocks, shape, chosen)
    choose_fused_attention(forms.fused_attention, shape, chosen)
    chosen.post_norm = choose_clusters(forms.cluster_stages, shape, chosen)
    in_clusters = choose_cluster_mlp(forms.cluster_mlps, shape, chosen)
    choose_streamed_mlp(forms.streamed_mlps, shape, chosen)
    by_windows = choose_windows(forms.hopper_windows, shape, chosen)
    whole = choose_whole(forms.hopper_whole, shape, chosen)
    choose_long_windows(forms.long_window_pairs, shape, chosen)
    chosen.few_rows |= in_clusters or by_windows or whole or chosen.post_norm is not None


def _hopper_products(plan: Planned, stage: int, M: int, chosen: Choice) -> None:
    """fc1 by the Hopper product, and the LayerNorms in front of what is one."""
    C, hidden, launch = plan.config.dim(stage), plan.config.hidden_dim(stage), chosen.launch
    if chosen.words["mlp"] == "library" and "fc1" not in launch:
        problem = (M, hidden, C, plan.precision.dtype, plan.device)
        chosen.reasons |= hopper_reason(*problem)
        fc1 = measured_config("linear", *problem)
        if fc1 is not None:
            launch["fc1"] = fc1
    products = [n for n in ("qkv", "fc1") if isinstance(launch.get(n), HopperGemmConfig)]
    chosen.ahead = plan.norms_ahead and not chosen.few_rows and bool(products)
    if chosen.ahead:
        behind = " and ".join(products)
        chosen.reasons["norm"] = f"launched programmatically, and {behind} behind it"

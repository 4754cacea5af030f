"""Stages that run in special forms, by windows or rows of a batch: one table for each form."""

from __future__ import annotations

import dataclasses

from fastswin._triton.cluster import why_no_clusters
from fastswin.engine.cluster_mlp_stage import CLUSTER_MLPS, ClusterMlps
from fastswin.engine.cluster_stage import CLUSTER_STAGES, ClusterStages
from fastswin.engine.fused_attention import FUSED_ATTENTION, FUSED_CAPABILITIES, FusedAttention
from fastswin.engine.hopper_attention import (
    HOPPER_WHOLE,
    HOPPER_WINDOWS,
    LONG_WINDOW_PAIRS,
    HopperWhole,
    HopperWindows,
)
from fastswin.engine.streamed_mlp_stage import STREAMED_MLPS, StreamedMlps
from fastswin.engine.whole_block import WHOLE_BLOCKS, WholeBlocks

#: Fewest multiprocessors of a whole card of compute capability 9.0 (an H100 PCIe's); the tables are
#: of 132. A slice of one may hold no cluster of 12 or 16 programs.
MIN_MULTIPROCESSORS = 114


@dataclasses.dataclass(frozen=True)
class FormTables:
    """One plan's tables; empty ones where a form is not to be taken."""

    fused_attention: FusedAttention
    whole_blocks: WholeBlocks
    cluster_stages: ClusterStages
    cluster_mlps: ClusterMlps
    streamed_mlps: StreamedMlps
    hopper_windows: HopperWindows
    hopper_whole: HopperWhole
    long_window_pairs: int


def form_tables(
    device_type: str,
    capability: tuple[int, int],
    multiprocessors: int,
    blocked: str | None,
    launched_apart: bool,
    fused_attention: FusedAttention | None,
    whole_blocks: WholeBlocks | None,
    cluster_stages: ClusterStages | None,
    cluster_mlps: ClusterMlps | None,
) -> FormTables:
    """The caller's tables, or the engine's where the card takes their forms.

    Who decides about attention halves leaves the others out as well, unless they are given; who
    decides about MLPs in clusters, the other forms of compute capability 9.0.

    Args:
        device_type, capability, multiprocessors: of the device where the plan will run.
        blocked: why no kernel runs, None where they do.
        launched_apart: whether nothing may be launched programmatically.
        fused_attention, whole_blocks, cluster_stages, cluster_mlps: the caller's, None for the
            engine's.
    """
    measured = blocked is None and capability[0] in FUSED_CAPABILITIES
    no_clusters = (
        blocked is not None
        or fused_attention is not None
        or why_no_clusters(device_type, capability) is not None
        or multiprocessors < MIN_MULTIPROCESSORS
    )
    if fused_attention is None:
        fused_attention = FUSED_ATTENTION if measured else {}
    if whole_blocks is None:
        whole_blocks = {} if no_clusters else WHOLE_BLOCKS
    if cluster_stages is None:
        cluster_stages = {} if no_clusters or launched_apart else CLUSTER_STAGES
    hopper_windows: HopperWindows = {}
    hopper_whole: HopperWhole = {}
    long_window_pairs = 0
    streamed_mlps: StreamedMlps = {}
    if cluster_mlps is None:
        cluster_mlps = {}
        if not no_clusters and not launched_apart:
            cluster_mlps, hopper_windows = CLUSTER_MLPS, HOPPER_WINDOWS
            hopper_whole, streamed_mlps = HOPPER_WHOLE, STREAMED_MLPS
            long_window_pairs = LONG_WINDOW_PAIRS
    return FormTables(
        fused_attention, whole_blocks, cluster_stages, cluster_mlps, streamed_mlps,
        hopper_windows, hopper_whole, long_window_pairs,
    )  # fmt: skip

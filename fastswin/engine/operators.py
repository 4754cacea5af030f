"""The fastswin operators that the forward pass calls, in one place.

A stand-in with the same names can be given to ``Forward``, to note calls or to time them.
"""

from __future__ import annotations

import torch

from fastswin.ops import (
    add_split_k,
    gather_neighbours,
    layer_norm,
    layer_norm_per_token,
    library_linear,
    linear,
    linear_post_norm,
    merge_neighbours,
    mlp,
    norm_pool,
    norm_pool_head,
    patch_embed,
    quantize,
    quantize_per_token,
    quantized_linear,
    quantized_mlp,
    split_k_linear,
)
from fastswin.ops.attention_half.config import HeadsConfig, WholeWindowConfig
from fastswin.ops.attention_half.hopper_config import (
    HopperHeadsConfig,
    HopperWholeConfig,
    HopperWindowsConfig,
)
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.cluster_mlp.weights import PackedMlp
from fastswin.ops.swin_block.packing import PackedBlock
from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.ops.window_attention.hopper_config import HopperAttentionConfig
from fastswin.ops.window_attention.quantized import quantized_window_attention_ref
from fastswin.ops.window_attention.reference import window_attention_ref
from fastswin.ops.window_attention.register import window_attention_fwd

__all__ = [
    "add_split_k",
    "gather_neighbours",
    "layer_norm",
    "layer_norm_per_token",
    "library_linear",
    "linear",
    "linear_post_norm",
    "merge_neighbours",
    "mlp",
    "norm_pool",
    "norm_pool_head",
    "packed_attention_half",
    "packed_heads_attention",
    "packed_mlp",
    "packed_swin_block",
    "packed_window_attention",
    "patch_embed",
    "quantize",
    "quantize_per_token",
    "quantized_linear",
    "quantized_mlp",
    "quantized_window_attention_ref",
    "split_k_linear",
    "window_attention_ref",
]

Pair = tuple[int, int]


def packed_window_attention(
    qkv: torch.Tensor,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    tf32: bool,
    config: WindowAttentionConfig | HopperAttentionConfig | None = None,
    *,
    qkv_scale: torch.Tensor | None = None,
    output_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    pdl: bool = False,
    split: bool = False,
) -> torch.Tensor:
    """Window attention ``[B, H, W, 3C] -> [B, H, W, C]`` on packed bias tables.

    Args:
        qkv, scale, num_heads, window_size, shift_size: as ``ops.window_attention`` has them.
        bias, head_scale: packed (ops/window_attention/packing.py).
        pad_qkv: ``[3C]``, the qkv of a padded token, in qkv's dtype.
        tf32: whether fp32 products run on tensor cores.
        config: tiles; None takes the heuristic. A :class:`HopperAttentionConfig` is of half
            precision, without cosine, padded tokens or 8 bits.
        qkv_scale: fp32 ``[3]``, steps of 8-bit q, k and v; None where they are wide.
        output_scale: fp32 ``[1]``, step of an 8-bit output; None where it is wide.
        out_dtype: of the output; None takes qkv's.
        pdl: programmatic dependent launch (_triton/pdl.py).
        split: whether fp32 products are the sum of three TF32 ones.
    """
    if isinstance(config, HopperAttentionConfig):
        from fastswin.ops.window_attention.launch_hopper import hopper_attention_fwd

        return hopper_attention_fwd(qkv, bias, scale, num_heads, window_size, shift_size, pdl=pdl)
    arguments = (
        qkv, bias, head_scale, pad_qkv, scale, num_heads, window_size, shift_size, tf32,
    )  # fmt: skip
    narrow = qkv_scale is not None or output_scale is not None
    if config is None and not narrow and not pdl and not split:
        return window_attention_fwd(*arguments)
    from fastswin.ops.window_attention import forward

    if narrow:
        return forward.window_attention_fwd(
            *arguments, config=config, qkv_scale=qkv_scale, output_scale=output_scale,
            out_dtype=out_dtype, pdl=pdl,
        )  # fmt: skip
    return forward.window_attention_fwd(*arguments, config=config, pdl=pdl, split=split)


def packed_heads_attention(
    x: torch.Tensor,
    weight: torch.Tensor,
    vectors: torch.Tensor,
    offset: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float | None,
    config: HeadsConfig | HopperHeadsConfig | HopperWindowsConfig | None = None,
    *,
    pdl: bool = False,
    norm_stats: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm, qkv and window attention ``[B, H, W, C] -> [B, H, W, C]`` in one kernel.

    Args:
        x, offset, scale, num_heads, window_size, shift_size: as ``ops.attention_half`` has them.
        weight: qkv's, ``vectors`` packed with it (ops/attention_half/packing.py).
        bias, head_scale, pad_qkv: as :func:`packed_window_attention`.
        eps: of the LayerNorm; None where there is none in front (V2).
        config: tiles; None takes the heuristic, and so does a :class:`HopperHeadsConfig` where
            statistics are needed and not there. Hopper's have no padded tokens, and expect an
            ``offset`` only in ``vectors``.
        pdl: programmatic dependent launch (_triton/pdl.py).
        norm_stats: ``[2, parts, B * H * W]`` of x's rows, which another product has left
            (``stats_out`` of ``ops.linear``); None computes them.
    """
    if isinstance(config, HopperHeadsConfig):
        if eps is None or norm_stats is not None:
            from fastswin.ops.attention_half.hopper_launch import hopper_heads_fwd

            return hopper_heads_fwd(
                x, weight, vectors, bias, head_scale, scale, num_heads, window_size, shift_size,
                eps, pdl, norm_stats,
            )  # fmt: skip
        config = None
    if isinstance(config, HopperWindowsConfig):
        from fastswin.ops.attention_half.hopper_launch import hopper_windows_fwd

        return hopper_windows_fwd(
            x, weight, vectors, bias, head_scale, scale, num_heads, window_size, shift_size, eps,
            pdl, norm_stats, config,
        )  # fmt: skip
    from fastswin.ops.attention_half import heads

    return heads.heads_attention_fwd(
        x, weight, vectors, offset, bias, head_scale, pad_qkv, scale, num_heads, window_size,
        shift_size, eps, config=config, pdl=pdl, norm_stats=norm_stats,
    )  # fmt: skip


def packed_attention_half(
    x: torch.Tensor,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    pad_qkv: torch.Tensor | None,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: float,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    norm_first: bool,
    config: WholeWindowConfig | HopperWholeConfig | None = None,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    vectors: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention half of a block from LayerNorm to residual in one kernel; ``out`` may be ``x``.

    Arguments are those of ``ops.attention_half``; ``bias`` and ``head_scale`` are packed. A
    :class:`HopperWholeConfig` takes no ``offset`` and reads ``vectors`` (packing.pack_whole)
    instead of biases and V2's norm.
    """
    if isinstance(config, HopperWholeConfig):
        from fastswin.ops.attention_half.hopper_launch import hopper_whole_fwd

        assert vectors is not None
        assert offset is None  # an MLP that leaves a bias is not in front of it
        return hopper_whole_fwd(
            x, qkv_weight, vectors, bias, head_scale, proj_weight, scale, num_heads, window_size,
            shift_size, eps, norm_first, out, pdl, config,
        )  # fmt: skip
    from fastswin.ops.attention_half import whole

    return whole.whole_window_fwd(
        x, qkv_weight, qkv_bias, offset, bias, head_scale, pad_qkv, proj_weight, proj_bias,
        norm_weight, norm_bias, scale, num_heads, window_size, shift_size, eps, norm_first,
        out=out, config=config, pdl=pdl,
    )  # fmt: skip


def packed_mlp(
    x: torch.Tensor,
    weights: PackedMlp,
    eps: float,
    config: ClusterMlpConfig,
    *,
    out: torch.Tensor,
    pdl: bool = False,
    stats_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The MLP half of a block ``[..., C]`` in clusters of programs; ``out`` may be ``x``.

    Args:
        x, out, eps, pdl: as ``ops.mlp`` has them, both contiguous.
        weights: packed, for as many programs as ``config`` says.
        config: tiles.
        stats_out: fp32 ``[2, C / 128, rows]`` where the statistics of ``out``'s rows go.
    """
    from fastswin.ops.cluster_mlp.launch import cluster_mlp_fwd

    C = x.shape[-1]
    cluster_mlp_fwd(
        x.view(-1, C), weights.tiles, weights.fc1_sums, weights.fc1_bias, weights.fc2_bias, eps,
        out.view(-1, C), config, pdl, stats_out, weights.norm,
    )  # fmt: skip
    return out


def packed_swin_block(
    x: torch.Tensor,
    weights: PackedBlock,
    bias: torch.Tensor,
    head_scale: torch.Tensor | None,
    scale: float,
    window_size: Pair,
    shift_size: Pair,
    eps: float,
    *,
    out: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """Both halves of a block in one kernel; ``out`` may be ``x``.

    Arguments are those of ``ops.swin_block``; ``weights``, ``bias`` and ``head_scale`` are packed.
    """
    from fastswin.ops.swin_block.launch import swin_block_fwd

    return swin_block_fwd(
        x, weights, bias, head_scale, scale, window_size, shift_size, eps, out, pdl
    )

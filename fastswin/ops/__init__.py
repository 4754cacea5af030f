"""Fused operators, usable alone in anybody's model; nothing here knows about models."""

from fastswin.ops.attention_half import attention_half
from fastswin.ops.cluster_linear import linear_post_norm
from fastswin.ops.feed_forward import feed_forward
from fastswin.ops.layer_norm import layer_norm, layer_norm_per_token
from fastswin.ops.library_linear import library_linear
from fastswin.ops.linear import linear
from fastswin.ops.masked_softmax import (
    grouped_tril_softmax,
    masked_softmax,
    masked_softmax_,
    scaled_masked_softmax,
    window_softmax,
)
from fastswin.ops.mlp import mlp
from fastswin.ops.patch_embed import patch_embed
from fastswin.ops.patch_merging import (
    gather_layer_norm,
    gather_layer_norm_linear,
    gather_neighbours,
    merge_neighbours,
)
from fastswin.ops.pool import norm_pool, norm_pool_head
from fastswin.ops.quantize import quantize, quantize_per_token
from fastswin.ops.quantized_linear import quantized_linear
from fastswin.ops.quantized_mlp import quantized_mlp
from fastswin.ops.residual_norm import add_layer_norm, layer_norm_add, residual_add
from fastswin.ops.split_k import add_split_k, split_k_linear
from fastswin.ops.swin_block import swin_block
from fastswin.ops.window_attention import (
    quantized_window_attention,
    window_attention,
    window_attention_partitioned,
)

__all__ = [
    "add_layer_norm",
    "add_split_k",
    "attention_half",
    "feed_forward",
    "gather_layer_norm",
    "gather_layer_norm_linear",
    "gather_neighbours",
    "grouped_tril_softmax",
    "layer_norm",
    "layer_norm_add",
    "layer_norm_per_token",
    "library_linear",
    "linear",
    "linear_post_norm",
    "masked_softmax",
    "masked_softmax_",
    "merge_neighbours",
    "mlp",
    "norm_pool",
    "norm_pool_head",
    "patch_embed",
    "quantize",
    "quantize_per_token",
    "quantized_linear",
    "quantized_mlp",
    "quantized_window_attention",
    "residual_add",
    "scaled_masked_softmax",
    "split_k_linear",
    "swin_block",
    "window_attention",
    "window_attention_partitioned",
    "window_softmax",
]

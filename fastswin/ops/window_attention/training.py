"""The differentiable operators: schemas and registration; imports no Triton.

They take raw arguments (``bias`` dense, or in image order a table ``[rows, nH]``), pack them inside
(tables.py) and keep for the backward nothing but them, the seed and, where the backward works in
tiles, output and row statistics. A compiled graph holds one opaque node per direction. Empty
tensors stand for what is not computed. What they do is in training_image.py and
training_partitioned.py, how they are differentiated in autograd.py.
"""

from __future__ import annotations

import torch

from fastswin.ops.window_attention import autograd, training_image, training_partitioned

_TAGS = (torch.Tag.pt2_compliant_tag,)
_IMAGE = "Tensor? bias, Tensor? logit_scale, Tensor? qkv_bias, Tensor? seed"
_IMAGE_OPTIONS = (
    "float scale, int num_heads, int[2] window_size, int[2] shift_size, bool tf32, "
    "float dropout_p, bool sum_qkv_grad"
)
_PARTITIONED = "Tensor? bias, Tensor? mask, Tensor? logit_scale, Tensor? seed"
_PARTITIONED_OPTIONS = "float scale, bool tf32, float dropout_p"

torch.library.define(
    "fastswin::window_attention",
    f"(Tensor qkv, {_IMAGE}, {_IMAGE_OPTIONS}, bool save_stats, bool split=False) -> "
    "(Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_bwd",
    f"(Tensor grad, Tensor qkv, Tensor? out, Tensor? row_stats, {_IMAGE}, {_IMAGE_OPTIONS}, "
    "bool[4] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_partitioned",
    f"(Tensor q, Tensor k, Tensor v, {_PARTITIONED}, {_PARTITIONED_OPTIONS}, bool save_stats, "
    "bool split=False) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "fastswin::window_attention_partitioned_bwd",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? row_stats, "
    f"{_PARTITIONED}, {_PARTITIONED_OPTIONS}, bool[5] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

for _name, _module in (
    ("window_attention", training_image),
    ("window_attention_partitioned", training_partitioned),
):
    torch.library.impl(f"fastswin::{_name}", "default", _module.forward)
    torch.library.register_fake(f"fastswin::{_name}", _module.forward_fake)
    torch.library.impl(f"fastswin::{_name}_bwd", "default", _module.backward)
    torch.library.register_fake(f"fastswin::{_name}_bwd", _module.backward_fake)
autograd.register_gradients()

window_attention = torch.ops.fastswin.window_attention
window_attention_bwd = torch.ops.fastswin.window_attention_bwd
window_attention_partitioned = torch.ops.fastswin.window_attention_partitioned
window_attention_partitioned_bwd = torch.ops.fastswin.window_attention_partitioned_bwd

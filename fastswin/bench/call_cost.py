"""What one call of a forward pass has to do: floating-point operations and bytes.

FLOPs are those of the matrix products, 2 per multiply-add; norms, softmax and GELU count nothing,
as in the model's roofline. Bytes are those of a perfect kernel: every distinct tensor read once,
the result written once (an updated tensor both). Attention counts whole windows, padding included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fastswin.engine.calls import Call
from fastswin.ops.swin_block.packing import PackedBlock


def call_flops(call: Call) -> int:
    """Floating-point operations of the matrix products in a call."""
    count = _FLOPS.get(call.name.removeprefix("ops."))
    return count(call) if count is not None else 0


def call_bytes(call: Call) -> int:
    """Bytes that a call has to move through device memory."""
    inputs = [*call.args, *(value for name, value in call.kwargs.items() if name != "out")]
    inputs += [t for packed in inputs if isinstance(packed, PackedBlock) for t in packed.tensors()]
    reads = {
        (t.data_ptr(), t.numel()): t.numel() * t.element_size()
        for t in inputs
        if isinstance(t, torch.Tensor)
    }
    return sum(reads.values()) + call.result.numel() * call.result.element_size()


def _linear(call: Call) -> int:
    return 2 * call.args[0].numel() * call.args[1].shape[0]


def _addmm(call: Call) -> int:
    return 2 * call.args[1].numel() * call.args[2].shape[1]


def _mlp(call: Call) -> int:
    return 4 * call.args[0].numel() * call.args[1].shape[0]


def _patch_embed(call: Call) -> int:
    weight = call.args[1]
    return 2 * (call.result.numel() // weight.shape[0]) * weight.numel()


def _attention(call: Call) -> int:
    return _window_products(call, call.args[0].shape[3] // 3)


def _window_products(call: Call, C: int) -> int:
    window = next(a for a in call.args if isinstance(a, (tuple, list)))  # the shift comes after it
    B, H, W, _ = call.args[0].shape
    windows = B * math.ceil(H / window[0]) * math.ceil(W / window[1])
    return 4 * windows * (window[0] * window[1]) ** 2 * C


def _fused_attention(call: Call) -> int:
    """Projections of all tokens, and attention; proj too where the call has its weight."""
    x = call.args[0]
    C = x.shape[3]
    weights = [a for a in call.args if isinstance(a, torch.Tensor) and a.shape[-1:] == (C,)]
    outputs = sum(w.shape[0] for w in weights if w.ndim == 2 and w.dtype == x.dtype)
    return 2 * x.numel() * outputs + _window_products(call, C)


def _whole_block(call: Call) -> int:
    """Projections and the MLP of all tokens, and attention."""
    x, weights = call.args[:2]
    products = sum(w.numel() for w in (weights.heads, weights.fc1, weights.fc2))
    return 2 * (x.numel() // x.shape[3]) * products + _window_products(call, x.shape[3])


_FLOPS: dict[str, Callable[[Call], int]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mlp": _mlp,
    "patch_embed": _patch_embed,
    "packed_window_attention": _attention,
    "packed_attention_half": _fused_attention,
    "packed_heads_attention": _fused_attention,
    "packed_swin_block": _whole_block,
    "window_attention_ref": _attention,
}

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


def call_flops(call: Call) -> int:
    """Floating-point operations of the matrix products in a call."""
    count = _FLOPS.get(call.name.removeprefix("ops."))
    return count(call) if count is not None else 0


def call_bytes(call: Call) -> int:
    """Bytes that a call has to move through device memory."""
    inputs = [*call.args, *(value for name, value in call.kwargs.items() if name != "out")]
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
    qkv = call.args[0]
    window = next(a for a in call.args if isinstance(a, (tuple, list)))  # the shift comes after it
    B, H, W, channels = qkv.shape
    windows = B * math.ceil(H / window[0]) * math.ceil(W / window[1])
    return 4 * windows * (window[0] * window[1]) ** 2 * (channels // 3)


_FLOPS: dict[str, Callable[[Call], int]] = {
    "linear": _linear,
    "addmm": _addmm,
    "mlp": _mlp,
    "patch_embed": _patch_embed,
    "packed_window_attention": _attention,
    "window_attention_ref": _attention,
}

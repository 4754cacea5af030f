"""What operators give, by their arguments alone: memory for the result of a call that is not made.

Kernels are compiled before the first image by a forward pass in which none of them runs (calls.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastswin._triton.device import multiprocessor_count
from fastswin._triton.tiles import cdiv
from fastswin.engine import operators
from fastswin.ops.split_k.config import SplitKConfig, default_split_k_config

#: Operators whose result has the shape of their first argument.
_SAME_SHAPE = (
    operators.layer_norm, operators.layer_norm_per_token, operators.mlp, operators.quantize,
    operators.quantize_per_token, operators.quantized_mlp, operators.packed_attention_half,
    operators.packed_heads_attention, operators.packed_mlp, operators.packed_swin_block,
)  # fmt: skip


def empty_result(function: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Memory like an operator's result, two tensors where it gives values and their scales.

    Args:
        function, args, kwargs: of operators.py.

    Raises:
        NotImplementedError: the operator's result has a shape that is not known here.
    """
    x = args[0]
    dtype = kwargs.get("out_dtype") or kwargs.get("dtype") or x.dtype
    if function in (operators.quantize, operators.quantize_per_token):
        dtype = args[-1]
    if function is operators.add_split_k:
        dtype = kwargs.get("out_dtype") or args[1].dtype
    if function is operators.split_k_linear:
        config = kwargs.get("config") or _split_k_heuristic(x, args[1])
        return x.new_empty((config.splits, *x.shape[:-1], args[1].shape[0]), dtype=torch.float32)
    result = x.new_empty(_shape_of(function, args), dtype=dtype)
    if function in (operators.layer_norm_per_token, operators.quantize_per_token):
        return result, x.new_empty(x.shape[:-1], dtype=torch.float32)
    return result


def _split_k_heuristic(x: torch.Tensor, weight: torch.Tensor) -> SplitKConfig:
    """The cut that ``ops.split_k_linear`` takes by itself."""
    N, K = weight.shape
    found = default_split_k_config(x.numel() // K, N, K, multiprocessor_count(x.device))
    assert found is not None  # planned only where K can be cut
    return found


def _shape_of(function: Callable[..., torch.Tensor], args: tuple) -> tuple[int, ...]:
    """Shape of an operator's result."""
    x = args[0]
    if function in (operators.linear, operators.linear_post_norm, operators.quantized_linear):
        return (*x.shape[:-1], args[1].shape[0])
    if function is operators.packed_window_attention:
        return (*x.shape[:3], x.shape[3] // 3)
    if function is operators.gather_neighbours:
        B, H, W, C = x.shape
        return B, cdiv(H, 2), cdiv(W, 2), 4 * C
    if function is operators.merge_neighbours:
        B, H, W, _ = x.shape
        return B, cdiv(H, 2), cdiv(W, 2), args[1].shape[0]
    if function is operators.norm_pool_head:
        return x.shape[0], args[3].shape[0]
    if function is operators.norm_pool:
        return x.shape[0], x.shape[3]
    if function is operators.patch_embed:
        C, _, patch, _ = args[1].shape
        return x.shape[0], cdiv(x.shape[2], patch), cdiv(x.shape[3], patch), C
    if function is operators.add_split_k:
        return tuple(args[1].shape)
    if function in _SAME_SHAPE:
        return tuple(x.shape)
    raise NotImplementedError(
        f"call_results.py does not know the shape of {function.__name__}'s result"
    )

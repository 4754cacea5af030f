"""Public persistent stage: validation and dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastswin._triton.available import (
    Impl,
    choose_impl,
    why_no_gradient,
    why_not_half,
    why_not_triton,
)
from fastswin._triton.device import multiprocessor_count
from fastswin.ops.persistent_stage.config import (
    PersistentStageConfig,
    StageShape,
    persistent_stage_blocker,
    why_no_persistent_stage,
)
from fastswin.ops.persistent_stage.packing import BlockWeights, pack_stage
from fastswin.ops.persistent_stage.reference import persistent_stage_ref
from fastswin.ops.window_attention.packing import pack_bias

Pair = tuple[int, int]


def persistent_stage(
    x: torch.Tensor,
    blocks: Sequence[BlockWeights],
    *,
    num_heads: int,
    window_size: Pair,
    shift_size: Pair = (0, 0),
    scale: float | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    impl: Impl = "auto",
    config: PersistentStageConfig | None = None,
) -> torch.Tensor:
    """All V1 blocks of a stage on a few rows, one kernel of as many programs as fit the GPU.

    Args:
        x: ``[B, H, W, C]``, the residual stream in image order; H and W are whole numbers of
            windows.
        blocks: weights in order (:class:`BlockWeights`), LayerNorms' affine folded into them.
        num_heads: heads of every block.
        window_size, shift_size: tokens on each axis; the shift is that of shifted blocks.
        scale: of the scores; None is ``head_dim ** -0.5``.
        eps: of the LayerNorms.
        out: ``[B, H, W, C]`` where the result goes; may be ``x``.
        impl: "auto", "triton" or "reference".
        config: tiles; None takes the default.

    Returns:
        ``[B, H, W, C]`` in x's dtype.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
        RuntimeError: ``impl="triton"`` cannot run here; the message says why.
    """
    if x.ndim != 4 or num_heads < 1 or x.shape[3] % num_heads:
        raise ValueError(
            f"x must be [B, H, W, C] with C a multiple of num_heads={num_heads}, "
            f"got {tuple(x.shape)}"
        )
    B, H, W, C = x.shape
    if not blocks:
        raise ValueError("blocks must hold at least one block, got none")
    if out is not None and (out.shape != x.shape or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous and {tuple(x.shape)}, got {tuple(out.shape)}")
    if not all(0 <= s < w for s, w in zip(shift_size, window_size, strict=True)):
        raise ValueError(
            f"shift_size must satisfy 0 <= shift < window on each axis, got {shift_size} for "
            f"window_size {window_size}"
        )
    hidden = blocks[0].fc1_weight.shape[0]
    tokens = window_size[0] * window_size[1]
    for number, block in enumerate(blocks):
        _check_block(block, number, C, hidden, (num_heads, tokens, tokens))
    scale = (C // num_heads) ** -0.5 if scale is None else float(scale)
    shape = StageShape(B, (H, W), C, num_heads, hidden, window_size, shift_size)
    weights = [weight for block in blocks for weight, _ in block.matrices().values()]
    dtypes = {weight.dtype for weight in weights} - {x.dtype}
    chosen = choose_impl(
        impl,
        "persistent_stage",
        [
            why_not_triton(x.device, x.dtype),
            why_not_half(x.dtype),
            why_no_gradient(x, *weights),
            why_no_persistent_stage(x.device),
            persistent_stage_blocker(
                shape, config or PersistentStageConfig(), multiprocessor_count(x.device)
            ),
            f"weights are {dtypes.pop()}, x is {x.dtype}" if dtypes else None,
        ],
    )
    if chosen == "reference":
        y = persistent_stage_ref(x, blocks, num_heads, window_size, shift_size, scale, eps)
        return y if out is None else out.copy_(y)
    from fastswin.ops.persistent_stage.launch import persistent_stage_fwd

    tables = [
        pack_bias(
            block.bias, num_heads, window_size, shift_size if block.shifted else (0, 0), x.device
        )
        for block in blocks
    ]
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out is not x:
        out.copy_(x)
    return persistent_stage_fwd(out, pack_stage(blocks, tables), shape, scale, eps, config)


def _check_block(
    block: BlockWeights, number: int, C: int, hidden: int, bias_shape: tuple[int, int, int]
) -> None:
    shapes = {"qkv": (3 * C, C), "proj": (C, C), "fc1": (hidden, C), "fc2": (C, hidden)}
    for name, (weight, bias) in block.matrices().items():
        for part, tensor, shape in (
            ("weight", weight, shapes[name]), ("bias", bias, shapes[name][:1]),
        ):  # fmt: skip
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name}_{part} of block {number} must be {shape}, got {tuple(tensor.shape)}"
                )
    if block.bias is not None and tuple(block.bias.shape) != bias_shape:
        raise ValueError(
            f"bias of block {number} must be {bias_shape}, got {tuple(block.bias.shape)}"
        )

"""Problems of the attention half: small maps, distinct content in every window and head."""

from __future__ import annotations

import torch

#: Kernel, eager and oracle see the same numbers; what is a table stays fp32 in eager.
TABLES = ("bias", "logit_scale", "offset", "qkv_bias", "proj_bias", "norm_weight", "norm_bias")


def make_half(
    randn,
    *,
    batch: int = 1,
    map_size: tuple[int, int] = (7, 14),
    window: tuple[int, int] = (7, 7),
    shift: tuple[int, int] = (3, 3),
    channels: int = 32,
    heads: int = 2,
    version: int = 1,
    whole: bool = False,
    offset: bool = True,
    dtype: torch.dtype = torch.float16,
) -> dict:
    """Arguments of ``ops.attention_half``; rows with a mean, so that LayerNorm has work."""
    C, tokens = channels, window[0] * window[1]
    made = {
        "x": randn(batch, *map_size, C, dtype=dtype, spread=2.0) + 1,
        "qkv_weight": randn(3 * C, C, dtype=dtype, spread=1.5 * C**-0.5),
        "qkv_bias": randn(3 * C, spread=0.5),
        "num_heads": heads,
        "window_size": window,
        "shift_size": shift,
        "bias": randn(heads, tokens, tokens),
        "pad_qkv": randn(3 * C, dtype=dtype, spread=0.5),
    }
    if version == 2:
        made |= {"norm_first": False, "logit_scale": 1.5 + 0.5 * randn(heads)}
    elif offset:
        made["offset"] = randn(C, spread=0.5)
    if whole:
        made |= {
            "proj_weight": randn(C, C, dtype=dtype, spread=C**-0.5),
            "proj_bias": randn(C, spread=0.5),
        }
        if version == 2:
            made |= {"norm_weight": 1 + 0.3 * randn(C), "norm_bias": randn(C)}
    return made


def in_dtype(made: dict, dtype: torch.dtype) -> dict:
    """The same arguments for eager in ``dtype`` (fp64: the oracle)."""
    return {
        name: value.to(dtype)
        if isinstance(value, torch.Tensor) and (name not in TABLES or dtype == torch.float64)
        else value
        for name, value in made.items()
    }

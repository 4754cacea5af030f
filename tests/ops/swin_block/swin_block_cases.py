"""Problems of the whole block: distinct content in every window, head and layer."""

from __future__ import annotations

from typing import Any

import torch

Pair = tuple[int, int]

#: Kernel, eager and oracle see the same numbers; matrices are stored in the stream's dtype.
MATRICES = ("x", "qkv_weight", "proj_weight", "fc1_weight", "fc2_weight")


def make_block(
    *,
    heads: int = 2,
    version: int = 1,
    batch: int = 1,
    windows: Pair = (2, 1),
    window: Pair = (7, 7),
    shift: Pair = (3, 3),
    dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cpu",
    offset: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of ``ops.swin_block`` for a map of so many windows.

    Args:
        offset: rows lie around so many times their own number modulo 5.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return spread * torch.randn(*shape, generator=generator)

    C, tokens = 32 * heads, window[0] * window[1]
    H, W = windows[0] * window[0], windows[1] * window[1]
    rows = torch.arange(batch * H * W).view(batch, H, W, 1) % 5
    made: dict[str, Any] = {
        "x": draw(batch, H, W, C, spread=2.0) + offset * rows,
        "qkv_weight": draw(3 * C, C, spread=1.5 * C**-0.5), "qkv_bias": draw(3 * C, spread=0.5),
        "proj_weight": draw(C, C, spread=C**-0.5), "proj_bias": draw(C, spread=0.5),
        "fc1_weight": draw(4 * C, C, spread=C**-0.5), "fc1_bias": draw(4 * C, spread=0.5),
        "fc2_weight": draw(C, 4 * C, spread=(4 * C) ** -0.5), "fc2_bias": draw(C, spread=0.5),
        "bias": draw(heads, tokens, tokens),
    }  # fmt: skip
    if version == 2:
        made |= {
            "logit_scale": 1.5 + draw(heads, spread=0.5),
            "norm1_weight": 1 + draw(C, spread=0.3), "norm1_bias": draw(C, spread=0.5),
            "norm2_weight": 1 + draw(C, spread=0.3), "norm2_bias": draw(C, spread=0.5),
        }  # fmt: skip
    made = {name: t.to(dtype) if name in MATRICES else t for name, t in made.items()}
    made = {name: t.to(device) for name, t in made.items()}
    return made | {"num_heads": heads, "window_size": window, "shift_size": shift}


def in_double(made: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in fp64, for the oracle."""
    return {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in made.items()}

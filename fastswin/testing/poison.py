"""NaN-filled allocation: an output element that no kernel wrote becomes visible.

    with PoisonEmpty():
        y = ops.layer_norm(x)      # every torch.empty inside starts as NaN

A ``TorchFunctionMode``, so it needs no patching and ends with the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ALLOCATORS = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}


class PoisonEmpty(TorchFunctionMode):
    """Fills what ``torch.empty``, ``empty_like`` and ``new_empty`` return with NaN."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS and out.dtype.is_floating_point and not out.is_meta:
            out.detach().fill_(float("nan"))
        return out

"""The softmax of a window-attention module that keeps explicit scores, as one fused module.

In Microsoft's and timm's ``WindowAttention`` bias, mask and softmax are separate passes over
``[B_, nH, N, N]``. Put this module where their ``self.softmax`` is and hand it all three:

    self.softmax = fastswin.nn.WindowSoftmax()
    ...
    attn = self.softmax(q @ k.transpose(-2, -1), relative_position_bias, mask)
"""

from __future__ import annotations

import torch
from torch import nn

from fastswin._triton.available import Impl
from fastswin.ops.masked_softmax import masked_softmax, window_softmax


class WindowSoftmax(nn.Module):
    """``softmax(scores + bias + mask)`` over the keys of each window; no parameters, no state.

    Args:
        impl: "auto", "triton" or "reference".
    """

    def __init__(self, impl: Impl = "auto") -> None:
        super().__init__()
        self.impl = impl

    def forward(
        self,
        scores: torch.Tensor,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Probabilities of each query over its window's keys.

        Args:
            scores: ``[B_, nH, N, N]``, already scaled, the window index fastest in ``B_``;
                without bias and mask any ``[..., N]``, as ``nn.Softmax(dim=-1)``.
            bias: relative position bias, ``[nH, N, N]`` or ``[1, nH, N, N]``.
            mask: ``[nW, N, N]``; float is added, bool or uint8 non-zero hides.

        Returns:
            The scores' shape and dtype, contiguous.

        Raises:
            ValueError, TypeError: as in :func:`fastswin.ops.window_softmax`.
        """
        if bias is None and mask is None:
            return masked_softmax(scores, impl=self.impl)
        return window_softmax(scores, bias, mask, impl=self.impl)

    def extra_repr(self) -> str:
        return f"impl={self.impl!r}"

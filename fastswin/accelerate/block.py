"""The two ways through a Swin block over fused operators, whatever the framework.

    V1   x, n = x, LN1(x)                  V2   x = x + s * LN1(attention(x) + bias)
         x, n = x + s * (attention(n)           x = x + s * LN2(feed_forward(x) + bias)
                         + bias), LN2(x)
         x    = x + s * (feed_forward(n)
                         + bias)

The stream ``x [B, H, W, C]`` stays in image order; ``s`` is drop path's factor per image. What a
framework's mixin adds is where its layers are and what it calls its arguments.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
from torch import nn

from fastswin import ops
from fastswin.accelerate.parts import (
    Branch,
    autocast_dtype,
    autocast_norm_dtype,
    drop_path_scale,
    is_hooked,
    is_plain,
    why_hooked,
)
from fastswin.accelerate.swap import Fused, Options

Modules = tuple[nn.Module, ...]
Pair = tuple[int, int]


class FusedBlock(Fused):
    """Block of any framework; the abstract methods are the framework's."""

    #: Whether the norms come last in each half (V2).
    POST_NORM: ClassVar[bool]

    @staticmethod
    @abc.abstractmethod
    def _fastswin_layers_blocker(block: Any) -> str | None:
        """Why this block's layers are not those of a Swin block, None where they are."""

    @abc.abstractmethod
    def _fastswin_norms(self) -> tuple[Any, Any]:
        """The block's two LayerNorms."""

    @abc.abstractmethod
    def _fastswin_drop_paths(self) -> tuple[nn.Module, nn.Module]:
        """Drop path of the attention half and of the MLP half."""

    @abc.abstractmethod
    def _fastswin_linears(self) -> Modules:
        """The linear layers whose weights the fused operators read themselves."""

    @abc.abstractmethod
    def _fastswin_attend(self, x: torch.Tensor, shift_size: Pair) -> Branch:
        """Attention with its projection, ``[B, H, W, C]`` in and out."""

    @abc.abstractmethod
    def _fastswin_mlp(self, x: torch.Tensor, options: Options) -> Branch:
        """The MLP, ``[B, H, W, C]`` in and out."""

    @classmethod
    def _fastswin_blocker(cls, module: Any) -> str | None:
        if "forward" in module.__dict__:
            return "its forward is replaced on the instance"
        return cls._fastswin_layers_blocker(module) or why_hooked(module)

    def _fastswin_bypassed(self) -> bool:
        """Whether the original forward must run: an inner module was hooked or replaced.

        Asked on every call, since both happen after acceleration too (feature extraction, adapters
        with low-rank weights). A compiled block keeps what it was compiled with.
        """
        if torch.compiler.is_compiling():
            return False
        assert isinstance(self, nn.Module)
        inner = self.modules()
        next(inner)  # the block's own hooks run around its forward
        return any(is_hooked(m) for m in inner) or not all(
            is_plain(m, nn.Linear) for m in self._fastswin_linears()
        )

    def _fastswin_forward(self, x: torch.Tensor, shift_size: Pair) -> torch.Tensor:
        """The block on the stream ``x [B, H, W, C]``."""
        options = self._fastswin
        half = autocast_dtype(x)
        stream_dtype = options.residual_dtype if half is not None else None
        if stream_dtype is not None:
            x = x.to(stream_dtype)
        if self.POST_NORM:
            return self._fastswin_post_norm(x, shift_size, options, half, stream_dtype)
        return self._fastswin_pre_norm(x, shift_size, options, half, stream_dtype)

    def _fastswin_pre_norm(
        self,
        x: torch.Tensor,
        shift_size: Pair,
        options: Options,
        half: torch.dtype | None,
        stream_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        norm1, norm2 = self._fastswin_norms()
        drop1, drop2 = self._fastswin_drop_paths()
        norm_dtype = half or x.dtype
        x, n = ops.add_layer_norm(
            x, norm1.weight, norm1.bias, eps=norm1.eps, norm_dtype=norm_dtype, impl=options.impl
        )
        y, bias = self._fastswin_attend(n, shift_size)
        x, n = ops.add_layer_norm(
            x, norm2.weight, norm2.bias, eps=norm2.eps, branch=y, branch_bias=bias,
            branch_scale=drop_path_scale(drop1, y, y.dtype), stream_dtype=stream_dtype,
            norm_dtype=norm_dtype, impl=options.impl,
        )  # fmt: skip
        y, bias = self._fastswin_mlp(n, options)
        return ops.residual_add(
            x, y, branch_bias=bias, branch_scale=drop_path_scale(drop2, y, y.dtype),
            stream_dtype=stream_dtype, impl=options.impl,
        )  # fmt: skip

    def _fastswin_post_norm(
        self,
        x: torch.Tensor,
        shift_size: Pair,
        options: Options,
        half: torch.dtype | None,
        stream_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        norm1, norm2 = self._fastswin_norms()
        drop1, drop2 = self._fastswin_drop_paths()
        if stream_dtype is None:
            # an fp32 norm added to a half-precision stream makes it fp32
            stream_dtype = x.dtype if half is None else autocast_norm_dtype(x)
        y, bias = self._fastswin_attend(x, shift_size)
        x = ops.layer_norm_add(
            x, y, norm1.weight, norm1.bias, eps=norm1.eps, branch_bias=bias,
            branch_scale=drop_path_scale(drop1, y, stream_dtype), stream_dtype=stream_dtype,
            impl=options.impl,
        )  # fmt: skip
        y, bias = self._fastswin_mlp(x.to(half or x.dtype), options)
        return ops.layer_norm_add(
            x, y, norm2.weight, norm2.bias, eps=norm2.eps, branch_bias=bias,
            branch_scale=drop_path_scale(drop2, y, stream_dtype), stream_dtype=stream_dtype,
            impl=options.impl,
        )  # fmt: skip


def check_stream(x: torch.Tensor, channels: int, layout: str) -> None:
    """ValueError unless a block's input has the rank and channels of ``layout``."""
    rank = layout.count(",") + 1
    if x.ndim != rank or x.shape[-1] != channels:
        raise ValueError(f"x must be {layout} with C = {channels}, got shape {tuple(x.shape)}")

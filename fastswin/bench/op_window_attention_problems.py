"""The problems of the window-attention suite: shapes, inputs, and the same operation elsewhere.

Every contender goes from a qkv map to an output map in image order: roll, partition, reverse and
the heads' transposition are part of what people write around SDPA, and of what is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.ops.window_attention.geometry import shift_attention_mask
from fastswin.ops.window_attention.reference import (
    COSINE_EPS,
    MAX_LOGIT_SCALE,
    partition,
    unpartition,
)

Function = Callable[["Inputs"], torch.Tensor]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of one call; ``mask`` is the expanded shift mask ``[nW, N, N]`` of the contenders."""

    qkv: torch.Tensor
    bias: torch.Tensor
    mask: torch.Tensor
    grad: torch.Tensor
    logit_scale: torch.Tensor | None = None

    def leaves(self) -> Inputs:
        """The same values, as leaves that need a gradient."""

        def leaf(t: torch.Tensor) -> torch.Tensor:
            return t.detach().clone().requires_grad_()

        scale = None if self.logit_scale is None else leaf(self.logit_scale)
        return Inputs(leaf(self.qkv), leaf(self.bias), self.mask, self.grad, scale)

    def to(self, dtype: torch.dtype) -> Inputs:
        """Everything in another dtype."""
        scale = None if self.logit_scale is None else self.logit_scale.to(dtype)
        return Inputs(
            self.qkv.to(dtype), self.bias.to(dtype), self.mask.to(dtype), self.grad.to(dtype), scale
        )  # fmt: skip

    @property
    def wanted(self) -> list[torch.Tensor]:
        """Tensors whose gradient a training step asks for."""
        scale = [] if self.logit_scale is None else [self.logit_scale]
        return [self.qkv, self.bias, *scale]


@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """One row of the suite, a shifted block.

    Attributes:
        name: model and stage.
        batch: images.
        side: of the map, a multiple of the window.
        window: side of the window; the shift is half of it.
        heads: of 32 channels each.
        cosine: V2.
        dtype: key of :data:`DTYPES`.
    """

    name: str
    batch: int
    side: int
    window: int
    heads: int
    cosine: bool = False
    dtype: str = "bf16"

    @property
    def case(self) -> str:
        return f"{self.name}_n{self.tokens}"

    @property
    def tokens(self) -> int:
        return self.window * self.window

    @property
    def shift(self) -> int:
        return self.window // 2

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def channels(self) -> int:
        return 32 * self.heads

    def make(self, device: torch.device, seed: int) -> Inputs:
        """Random inputs, the same for one seed on one device type."""
        rng = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device=device, dtype=dtype)

        shape = (self.batch, self.side, self.side)
        window, shift = (self.window,) * 2, (self.shift,) * 2
        return Inputs(
            randn(*shape, 3 * self.channels, dtype=self.torch_dtype),
            randn(self.heads, self.tokens, self.tokens),
            shift_attention_mask(shape[1:], window, shift, device),
            randn(*shape, self.channels, dtype=self.torch_dtype),
            randn(self.heads) + 2.0 if self.cosine else None,
        )

    def live_bytes(self, direction: str) -> int:
        """qkv read, output written; backward: qkv and dO read, dqkv written."""
        per_token = {"forward": 4, "backward": 7, "step": 11}[direction]
        tokens = self.batch * self.side * self.side
        return per_token * tokens * self.channels * self.torch_dtype.itemsize

    def fastswin(self, inputs: Inputs) -> torch.Tensor:
        """The operator under test, as a user calls it."""
        return ops.window_attention(
            inputs.qkv, num_heads=self.heads, window_size=(self.window,) * 2,
            shift_size=(self.shift,) * 2, bias=inputs.bias, logit_scale=inputs.logit_scale,
        )  # fmt: skip

    def eager(self, inputs: Inputs) -> torch.Tensor:
        """The formula as people write it, in the inputs' dtype."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = q @ k.transpose(-2, -1) + inputs.bias.to(q.dtype)
            windows = inputs.mask.shape[0]
            scores = scores.view(-1, windows, *scores.shape[1:]) + inputs.mask[:, None].to(q.dtype)
            return scores.flatten(0, 1).softmax(-1) @ v

        return self._around(inputs, attend)

    def sdpa(self, inputs: Inputs) -> torch.Tensor:
        """scaled_dot_product_attention with bias + mask expanded to every window of the batch."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            added = (inputs.bias + inputs.mask[:, None]).to(q.dtype)
            added = added.repeat(self.batch, 1, 1, 1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=1.0)

        return self._around(inputs, attend)

    def flex(self, inputs: Inputs) -> torch.Tensor:
        """FlexAttention with bias and mask as a score modification."""
        from torch.nn.attention.flex_attention import flex_attention

        windows = inputs.mask.shape[0]

        def add(score, b, h, q, k):  # type: ignore[no-untyped-def]
            return score + inputs.bias[h, q, k] + inputs.mask[b % windows, q, k]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flex_attention(q, k, v, score_mod=add, scale=1.0)

        return self._around(inputs, attend)

    def _around(
        self,
        inputs: Inputs,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Roll, partition, split heads, attend, and back."""
        window, shift = (self.window,) * 2, self.shift
        x = partition(torch.roll(inputs.qkv, (-shift, -shift), (1, 2)), window)
        q, k, v = x.view(x.shape[0], self.tokens, 3, self.heads, 32).permute(2, 0, 3, 1, 4)
        if inputs.logit_scale is None:
            q = q * 32**-0.5
        else:
            temperature = inputs.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp()
            q = F.normalize(q, dim=-1, eps=COSINE_EPS) * temperature[:, None, None].to(q.dtype)
            k = F.normalize(k, dim=-1, eps=COSINE_EPS)
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        out = unpartition(out, window, self.batch, (self.side, self.side))
        return torch.roll(out, (shift, shift), (1, 2))


#: Windows 7, 8, 12, 16 and 24 at the sizes that the issues and the prototypes measured.
PROBLEMS: tuple[AttentionProblem, ...] = (
    AttentionProblem("swin_t_stage1", 128, 56, 7, 3),
    AttentionProblem("swin_t_stage2", 128, 28, 7, 6),
    AttentionProblem("swin_t_stage3", 128, 14, 7, 12),
    AttentionProblem("swin_v2_stage1", 32, 64, 8, 3, cosine=True),
    AttentionProblem("swin_b_384_stage1", 32, 96, 12, 4),
    AttentionProblem("swin_v2_stage1", 32, 64, 16, 3, cosine=True),
    AttentionProblem("swin_v2_384_stage1", 8, 96, 24, 4, cosine=True),
)

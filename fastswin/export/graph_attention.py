"""Attention within windows as the exported graph holds it.

    plain      MatMul, Add of the constant bias (+ mask), Softmax, MatMul
    standard   one ``Attention`` of ONNX opset 23, bias (+ mask) as its ``attn_mask``

The bias is the dense ``[nH, N, N]``: gathered from V1's table, or computed by V2's bias MLP, when
the graph is made. V1's scale is multiplied into the query rows of the qkv projection, V2's
temperature ``exp(min(logit_scale, ln 100))`` is a constant ``[nH, 1, 1]``.

The shift mask is one constant ``[nW, 1, N, N]`` a stage, 0 or -100, shared by its blocks; its sum
with a block's bias does not depend on the images, so runtimes fold it when they load the graph
and the file stays small.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from fastswin.export.graph_layers import GraphLinear, buffer, folded
from fastswin.models.swin import WindowAttention
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.reference import COSINE_EPS, MAX_LOGIT_SCALE

AttentionForm = Literal["plain", "standard", "fastswin"]


class GraphAttention(nn.Module):
    """One block's attention over tokens in window order ``[B, nW * N, C]``."""

    def __init__(
        self,
        attention: WindowAttention,
        form: AttentionForm,
        fold_norm: nn.LayerNorm | None = None,
    ) -> None:
        """Take the weights of a readable block.

        Args:
            attention: the block's attention; its weights are copied.
            form: how the product is written.
            fold_norm: the norm in front, if its affine goes into the qkv projection.
        """
        super().__init__()
        self.form = form
        self.num_heads = attention.num_heads
        self.window_size = attention.window_size
        self.tokens = attention.window_size[0] * attention.window_size[1]
        channels = attention.proj.in_features
        self.head_dim = channels // self.num_heads
        position = attention.position_bias()
        self.bias = buffer(expand_bias_table(position["bias_table"].float(), self.window_size))
        self.scale = self.head_dim**-0.5 if attention.scale is None else attention.scale
        temperature = rows = None
        if "logit_scale" in position:
            clamped = position["logit_scale"].float().clamp(max=MAX_LOGIT_SCALE)
            temperature = buffer(clamped.exp().view(self.num_heads, 1, 1))
        elif form != "fastswin":
            rows = attention.proj.weight.new_ones(3 * channels)
            rows[:channels] = self.scale
        self.temperature = temperature
        own_bias = attention.qkv_bias
        self.qkv = GraphLinear(*folded(attention.qkv.weight, own_bias, fold_norm), rows)
        pad = None  # where it differs from the bias that a zero input gives
        if fold_norm is not None:
            pad = torch.zeros_like(fold_norm.weight).repeat(3) if own_bias is None else own_bias
            pad = buffer(pad if rows is None else pad * rows)
        self.pad_qkv = pad
        self.proj = GraphLinear(attention.proj.weight, attention.proj.bias)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, keep: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of every window.

        Args:
            x: ``[B, nW * N, C]``.
            mask: ``[nW, 1, N, N]``, or None where the block is not shifted.
            keep: ``[nW * N, 1]``, 0 where a token is padding; None without padding.

        Returns:
            ``[B, nW * N, C]`` in the same order.
        """
        windows = () if mask is None else (mask.shape[0],)
        split = (-1, *windows, self.tokens, self.num_heads, self.head_dim)
        q, k, v = (part.reshape(split) for part in self.projected(x, keep).chunk(3, dim=-1))
        out = self.attend(q, k, v, mask)
        return self.proj(out.reshape(-1, x.shape[1], self.num_heads * self.head_dim))

    def projected(self, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        """The qkv projection; a padded token has that of a zero input, which is the bias."""
        if keep is None:
            return self.qkv(x)
        if self.pad_qkv is None:
            return self.qkv(x * keep)
        return torch.where(keep != 0, self.qkv(x), self.pad_qkv.to(x.dtype))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """``q, k, v [..., N, nH, D]`` to ``[..., N, nH, D]``."""
        q, k, v = (part.transpose(-3, -2) for part in (q, k, v))
        if self.temperature is not None:
            q = (unit(q) * self.temperature).to(v.dtype)
            k = unit(k).to(v.dtype)
        if self.form == "standard":
            return self._standard(q, k, v, mask).transpose(-3, -2)
        scores = torch.matmul(q, k.transpose(-2, -1)).float()
        probs = torch.softmax(self.biased(scores, mask), dim=-1).to(v.dtype)
        return torch.matmul(probs, v).transpose(-3, -2)

    def biased(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Scores ``[..., nH, N, N]`` plus the bias and the mask; the constants are added first."""
        return scores + (self.bias if mask is None else self.bias + mask)

    def _standard(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The standard operator, windows folded into its heads so that one mask fits any batch."""
        bias = self.bias if mask is None else self.bias + mask
        folded = (-1, bias[..., 0, 0].numel(), self.tokens, self.head_dim)
        bias = bias.reshape(folded[1], self.tokens, self.tokens).to(q.dtype)
        flat = [part.reshape(folded) for part in (q, k, v)]
        out = torch.onnx.ops.attention(flat[0], flat[1], flat[2], bias, scale=1.0)[0]
        return out.reshape(q.shape)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of length 1 in fp32; squares of fp16 values beyond 256 would overflow."""
    x = x.float()
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(COSINE_EPS)

"""What fp8 tensor cores make of a product: the error that the format itself has.

    32 products at a time are aligned, with the sum so far, to the largest exponent among them and
    cut off 13 bits below it; the sum of these is cut off 13 bits below its own exponent

so Ada and Hopper do it: 14 bits of every aligned product and of the accumulator are used, the rest
is cut off (DeepSeek-V3, arXiv 2412.19437, section 3.5.2; the accumulator's 13 bits behind the
leading one also SageAttention2, arXiv 2411.10958). The error grows with the number of steps and
with the sums on the way, not with the result, so that no rounding of the result bounds it. The CUDA
library adds in the same units with fast accumulation.
"""

from __future__ import annotations

import torch

#: Products of one step, and bits of a sum behind the leading one.
TERMS, FRACTION_BITS = 32, 13

#: Products that :func:`fp8_product` holds at once: 128 MiB.
CHUNK_PRODUCTS = 1 << 25


def fp8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [M, K] @ weight [N, K].T`` of e4m3 numbers as tensor cores add it, fp32 ``[M, N]``.

    Every product is formed: seconds on a GPU for what a layer of a Swin needs there microseconds.
    """
    rows = max(1, CHUNK_PRODUCTS // (TERMS * max(1, len(weight))))
    return torch.cat([_fp8_rows(part, weight) for part in x.split(rows)])


def _fp8_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(len(x), len(weight), device=x.device)
    for start in range(0, x.shape[1], TERMS):
        a = x[:, start : start + TERMS].float()
        w = weight[:, start : start + TERMS].float()
        products = a[:, None] * w[None]  # exact: 4 by 4 bits
        unit = _unit(torch.maximum(products.abs().amax(-1), total.abs()))
        # 33 whole numbers below 2**14, whose sum fp32 holds exactly
        steps = (products / unit[..., None]).trunc_().sum(-1) + (total / unit).trunc_()
        total = steps * unit
        unit = _unit(total.abs())
        total = (total / unit).trunc_() * unit
    return total


def _unit(size: torch.Tensor) -> torch.Tensor:
    """Last bit that is kept beside numbers of this magnitude: a power of two."""
    exponent = torch.frexp(size.clamp_min(2.0**-60)).exponent - 1
    return torch.exp2((exponent - FRACTION_BITS).float())

"""How many steps of an 8-bit format two tensors lie apart."""

from __future__ import annotations

import torch


def steps_apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Distance in representable numbers, int32 of the inputs' shape; 1 for neighbours.

    Args:
        found, wanted: int8 or float8_e4m3fn, one dtype and shape. e4m3 codes are ordered like
            their numbers, but for the sign; NaN lies one step above the largest.
    """
    return (_codes(found) - _codes(wanted)).abs_()


#: Largest error of an e4m3 product beside the RMS of the results. Hopper's tensor cores keep 13
#: bits of a sum and cut off the rest at every 32 products: 2**-13 * 2.3 * sqrt(K / 32) by a random
#: walk, 1e-3 to 2e-3 measured for K of 384 to 3,072. Of a million results the largest error is five
#: times that; tests on a card record what they find (:func:`beyond_one_step`).
FAST_SUMS = 8e-3


def beyond_one_step(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference of elements more than one step off, over the RMS of ``wanted``.

    0 where every element is within one step. Around zero e4m3 has steps far below what a sum is
    good for, so that this number, not the steps, says how wrong a product is.

    Args:
        found, wanted: as for :func:`steps_apart`.
    """
    far = steps_apart(found, wanted) > 1
    if not far.any():
        return 0.0
    wide = wanted.float()
    size = wide.square().mean().sqrt()
    return float(((found.float() - wide).abs()[far].max() / size).nan_to_num(nan=float("inf")))


def within_one_step(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether no element is more than one step off, in e4m3 but for :data:`FAST_SUMS`.

    Args:
        found, wanted: as for :func:`steps_apart`.
    """
    return beyond_one_step(found, wanted) <= (0.0 if found.dtype == torch.int8 else FAST_SUMS)


def _codes(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.int8:
        return t.int()
    code = t.view(torch.int8).int()
    return torch.where(code < 0, -(code & 0x7F), code)

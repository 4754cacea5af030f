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


def _codes(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.int8:
        return t.int()
    code = t.view(torch.int8).int()
    return torch.where(code < 0, -(code & 0x7F), code)

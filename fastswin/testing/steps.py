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


def within_one_step(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether no element is more than one step off.

    Products in e4m3 keep about 13 bits of their sums on Hopper, an error of some 2e-3 of the
    results' size. Around zero the format has steps far below that: there, 8e-3 of the RMS counts.

    Args:
        found, wanted: as for :func:`steps_apart`.
    """
    near = steps_apart(found, wanted) <= 1
    if found.dtype != torch.int8:
        size = wanted.float().square().mean().sqrt()
        near |= (found.float() - wanted.float()).abs() <= 8e-3 * size
    return bool(near.all())


def _codes(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.int8:
        return t.int()
    code = t.view(torch.int8).int()
    return torch.where(code < 0, -(code & 0x7F), code)

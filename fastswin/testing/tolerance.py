"""The numeric gate of every kernel: as good as eager in the same dtype, against an fp64 oracle.

    error(kernel) <= 2 * (error(eager) + one rounding)

asserted for the largest error and for the relative RMS error; never only for a mean.
"""

from __future__ import annotations

import dataclasses

import torch

#: Factor on what eager and one rounding already lose.
FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class Gate:
    """Errors of a kernel and their bounds.

    Attributes:
        max_error, max_bound: largest absolute error and its bound.
        rms_error, rms_bound: root mean square error over the oracle's RMS, and its bound.
    """

    max_error: float
    max_bound: float
    rms_error: float
    rms_bound: float

    @property
    def passed(self) -> bool:
        return self.max_error <= self.max_bound and self.rms_error <= self.rms_bound


def compare_to_oracle(
    actual: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype
) -> Gate:
    """Errors and bounds of ``actual``; all three tensors have one shape.

    Args:
        actual: the kernel's result.
        eager: plain PyTorch in ``dtype``, on the same inputs.
        oracle: the same formula in float64.
        dtype: storage of the result; its unit roundoff and smallest number are one rounding.
            GPU kernels compute in fp32 and flush what is below its smallest normal number.
    """
    truth = oracle.double()
    info = torch.finfo(dtype)
    rms = truth.square().mean().sqrt().item() if truth.numel() else 0.0
    peak = truth.abs().max().item() if truth.numel() else 0.0
    smallest = max(info.smallest_normal * info.eps / 2, torch.finfo(torch.float32).smallest_normal)

    def errors(t: torch.Tensor) -> tuple[float, float]:
        if not truth.numel():
            return 0.0, 0.0
        wrong = (t.double() - truth).abs()
        return wrong.max().item(), wrong.square().mean().sqrt().item() / max(rms, 1e-300)

    max_error, rms_error = errors(actual)
    eager_max, eager_rms = errors(eager)
    max_bound = FACTOR * (eager_max + info.eps / 2 * peak + smallest)
    rms_bound = FACTOR * (eager_rms + info.eps / 2 + smallest / max(rms, 1e-300))
    return Gate(max_error, max_bound, rms_error, rms_bound)


def assert_close_to_oracle(
    actual: torch.Tensor, eager: torch.Tensor, oracle: torch.Tensor, dtype: torch.dtype
) -> Gate:
    """Raise unless ``actual`` is finite, in ``dtype`` and inside the gate; returns the errors.

    Raises:
        AssertionError: wrong shape or dtype, a NaN or infinity, or an error past its bound.
    """
    assert actual.shape == oracle.shape, f"shape {tuple(actual.shape)}, not {tuple(oracle.shape)}"
    assert actual.dtype == dtype, f"dtype {actual.dtype}, not {dtype}"
    assert bool(torch.isfinite(actual).all()), "the result holds NaN or infinity"
    gate = compare_to_oracle(actual, eager, oracle, dtype)
    assert gate.max_error <= gate.max_bound, f"max error {gate.max_error} > {gate.max_bound}"
    assert gate.rms_error <= gate.rms_bound, f"rms error {gate.rms_error} > {gate.rms_bound}"
    return gate

"""What calibration sees of one tensor, and the ranges that four methods read from it.

    max         the largest magnitude
    percentile  the magnitude that a share of all values does not exceed
    mse         the range whose quantisation error has the least square sum
    entropy     the range whose quantised distribution is nearest in KL divergence

A :class:`Histogram` counts float32 magnitudes by the top 16 bits of their representation (sign
dropped, 8 of exponent, 8 of mantissa): 65,536 bins of at most 0.4 % width that no data can move.
Counts are 64-bit integers, so the result does not depend on the order of the images, on batch
sizes or on how processes shared the work: merging is addition.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch

from fastswin.quant.scheme import LARGEST, Format, ObserverName

BINS = 1 << 16
_SHIFT = 15  # bits of a float32 magnitude below the bin number
_INFINITY = 0x7F800000
_FINITE_BINS = _INFINITY >> _SHIFT  # bins from here on hold infinities and NaN

#: Candidates of the two searches: shares of the largest magnitude.
_SHARES = np.linspace(0.05, 1.0, 96)
_ENTROPY_BINS = 2048


@functools.cache
def _edges() -> np.ndarray:
    """Lower edges of the finite bins and the last one's upper edge, float64."""
    bits = np.arange(_FINITE_BINS + 1, dtype=np.uint32) << _SHIFT
    bits[-1] -= 1  # the largest float instead of infinity
    return bits.view(np.float32).astype(np.float64)


@dataclasses.dataclass
class Histogram:
    """Counts of one tensor's magnitudes.

    Attributes:
        counts: int64 ``[65536]``.
        largest: largest finite magnitude, exactly.
    """

    counts: torch.Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(BINS, dtype=torch.int64)
    )
    largest: float = 0.0

    def observe(self, x: torch.Tensor) -> None:
        """Count every element of a tensor of any shape, dtype and device."""
        if not x.numel():
            return
        bits = x.detach().float().flatten().view(torch.int32) & 0x7FFFFFFF
        top = int(bits.max())
        if top >= _INFINITY:  # rare: only then pay for a second look
            finite = bits[bits < _INFINITY]
            top = int(finite.max()) if finite.numel() else 0
        self.largest = max(self.largest, float(np.uint32(top).view(np.float32)))
        self.counts += torch.bincount(bits >> _SHIFT, minlength=BINS).cpu()

    def merge(self, other: Histogram) -> None:
        """Add what another histogram saw."""
        self.counts += other.counts
        self.largest = max(self.largest, other.largest)

    @property
    def total(self) -> int:
        """Values seen, non-finite ones included."""
        return int(self.counts.sum())

    @property
    def non_finite(self) -> int:
        """Values seen that were NaN or infinite."""
        return int(self.counts[_FINITE_BINS:].sum())

    def amax(self, observer: ObserverName, percentile: float, format: Format) -> float:
        """The range ``[-amax, amax]`` that a method chooses; 0 where everything was 0.

        Args:
            observer: the method.
            percentile: for "percentile".
            format: what the range will be quantised to; "wide" is taken for int8.

        Raises:
            ValueError: nothing was seen, or something that is not finite.
        """
        if not self.total:
            raise ValueError("saw no values")
        if self.non_finite:
            raise ValueError(f"saw {self.non_finite} values that are NaN or infinite")
        if self.largest == 0.0 or observer == "max":
            return self.largest
        if observer == "percentile":
            return self._percentile(percentile)
        if observer == "mse":
            return self._least_squares("int8" if format == "wide" else format)
        return self._least_divergence()

    def _percentile(self, percentile: float) -> float:
        cumulative = np.cumsum(self.counts[:_FINITE_BINS].numpy())
        rank = percentile / 100.0 * float(cumulative[-1])
        bin_ = int(np.searchsorted(cumulative, rank))
        return min(_float32(_edges()[bin_ + 1]), self.largest)

    def _seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Centres and counts of the bins that hold anything."""
        counts = self.counts[:_FINITE_BINS].numpy()
        seen = np.nonzero(counts)[0]
        edges = _edges()
        return np.minimum((edges[seen] + edges[seen + 1]) / 2, self.largest), counts[seen]

    def _least_squares(self, format: Format) -> float:
        values, counts = self._seen()
        candidates = _SHARES * self.largest
        errors = [
            float((counts * (values - _rounded(values, amax, format)) ** 2).sum())
            for amax in candidates
        ]
        return _float32(candidates[int(np.argmin(errors))])

    def _least_divergence(self) -> float:
        values, counts = self._seen()
        step = self.largest / _ENTROPY_BINS
        linear = np.zeros(_ENTROPY_BINS)
        np.add.at(linear, np.minimum((values / step).astype(int), _ENTROPY_BINS - 1), counts)
        levels = 128  # magnitudes of a symmetric 8-bit format
        best, width = np.inf, _ENTROPY_BINS
        for candidate in range(levels, _ENTROPY_BINS + 1, 8):
            divergence = _divergence(linear, candidate, levels)
            if divergence < best:
                best, width = divergence, candidate
        return _float32(width * step)


def _rounded(values: np.ndarray, amax: float, format: Format) -> np.ndarray:
    scale = amax / LARGEST[format]
    scaled = np.minimum(values / scale, LARGEST[format])
    if format == "int8":
        return np.rint(scaled) * scale
    cast = torch.from_numpy(scaled).float().to(torch.float8_e4m3fn)
    return cast.double().numpy() * scale


def _divergence(histogram: np.ndarray, width: int, levels: int) -> float:
    """KL divergence of the first ``width`` bins, the rest clipped into the last, from themselves
    merged into ``levels`` groups and spread evenly over the bins that hold anything."""
    clipped = histogram[:width].copy()
    held = histogram[:width] > 0
    group = np.arange(width) * levels // width
    sums = np.bincount(group, histogram[:width], levels)
    members = np.bincount(group, held, levels)
    spread = np.where(held, sums[group] / np.maximum(members[group], 1), 0.0)
    clipped[-1] += histogram[width:].sum()
    p, q = clipped / clipped.sum(), spread / max(spread.sum(), 1e-300)
    inside = p > 0
    floor = 1e-12  # a clipped mass where the merged distribution has none
    return float((p[inside] * np.log(p[inside] / np.maximum(q[inside], floor))).sum())


def _float32(value: float) -> float:
    """The nearest float32, which JSON then carries exactly."""
    return float(np.float32(value))

"""Ranges of a calibrated model, as plain data: what kernels, exporters and the reference read.

    scale   = amax / 127 (int8) or amax / 448 (fp8); 1 where amax is 0, so zeros stay zeros
    inverse = 1 / scale, both rounded to float32
    q       = round_half_even(clamp(x * inverse, -127, 127))     (fp8: cast of the clamped)
    y       = (q_x @ q_w.T) * (input_scale * weight_scale) + bias

A :class:`Calibration` belongs to one model and one scheme; both fingerprints travel with it, and a
mismatch is an error instead of a wrong answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from fastswin.models.swin import SwinTransformer
from fastswin.quant.layers import QuantLayer, quant_layers
from fastswin.quant.scheme import LARGEST, Format, LayerScheme, Scheme, find_scheme


class QuantizationError(ValueError):
    """Ranges are missing, illegal, or belong to another model or scheme."""


@dataclasses.dataclass(frozen=True)
class LayerRange:
    """Ranges of one linear layer, its LayerNorm folded in.

    Attributes:
        name: the layer, such as ``layers.0.blocks.0.attn.qkv``.
        scheme: how it is quantised; ranges are there for a wide layer too.
        input_amax: static range of the input (the bare LayerNorm output in V1's qkv, fc1 and
            reduction).
        output_amax: static ranges of the output, bias included: ``(q, k, v)`` for qkv, one for
            proj, fc2 and reduction, none for fc1, whose output is fc2's input.
        weight_amax: float32 ``[N]`` on the CPU, per row of the folded weight; N equal values where
            the scheme says per tensor.
    """

    name: str
    scheme: LayerScheme
    input_amax: float
    output_amax: tuple[float, ...]
    weight_amax: torch.Tensor

    @property
    def input_scale(self) -> float:
        """Step of the quantised input, a float32 number."""
        return scale_of(self.input_amax, self.scheme.format)

    @property
    def output_scale(self) -> tuple[float, ...]:
        """Steps of the quantised output, one for each of ``output_amax``."""
        return tuple(scale_of(amax, self.scheme.format) for amax in self.output_amax)

    @property
    def weight_scale(self) -> torch.Tensor:
        """Steps of the quantised weight, float32 ``[N]``."""
        largest = LARGEST.get(self.scheme.format, LARGEST["int8"])
        return torch.where(self.weight_amax > 0, self.weight_amax / largest, 1.0)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """All ranges of one model under one scheme.

    Attributes:
        scheme: the scheme that they were chosen for.
        layers: one :class:`LayerRange` a layer, in the order of the forward pass.
        model_fingerprint: :func:`fingerprint_of` the model.
        images: how many images were seen.
    """

    scheme: Scheme
    layers: dict[str, LayerRange]
    model_fingerprint: str
    images: int

    def check(self, model: SwinTransformer, scheme: str | Scheme | None = None) -> None:
        """Raise QuantizationError unless these ranges are this model's and this scheme's."""
        if scheme is not None:
            wanted = find_scheme(scheme)
            if wanted.fingerprint != self.scheme.fingerprint:
                raise QuantizationError(
                    f"calibration: made for scheme {self.scheme.name!r} "
                    f"({self.scheme.fingerprint[:12]}), not for {wanted.name!r} "
                    f"({wanted.fingerprint[:12]}); calibrate again for that scheme"
                )
        if (found := fingerprint_of(model)) != self.model_fingerprint:
            raise QuantizationError(
                f"calibration: made for other weights (fingerprint "
                f"{self.model_fingerprint[:12]}, this model has {found[:12]}); calibrate again"
            )
        _check_complete(self.layers, quant_layers(model))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; weight ranges are left out, since the weights tell them."""
        return {
            "scheme": self.scheme.to_dict(),
            "scheme_fingerprint": self.scheme.fingerprint,
            "model_fingerprint": self.model_fingerprint,
            "images": self.images,
            "layers": {
                name: {"input_amax": r.input_amax, "output_amax": list(r.output_amax)}
                for name, r in self.layers.items()
            },
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], model: SwinTransformer) -> Calibration:
        """Build from :meth:`to_dict` for the model that the ranges were made for.

        Raises:
            QuantizationError: ranges of other weights, or a layer without a legal range; the
                message names the layers.
        """
        try:
            scheme = Scheme.from_dict(values["scheme"])
            fingerprint, images = str(values["model_fingerprint"]), int(values["images"])
            stored = {
                str(name): (float(r["input_amax"]), tuple(float(a) for a in r["output_amax"]))
                for name, r in values["layers"].items()
            }
            claimed = values["scheme_fingerprint"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise QuantizationError(f"calibration: malformed content ({error})") from error
        if claimed != scheme.fingerprint:
            raise QuantizationError(
                f"calibration: its scheme {scheme.name!r} was changed after calibration "
                f"(fingerprint {scheme.fingerprint[:12]}, ranges are for {str(claimed)[:12]})"
            )
        if (found := fingerprint_of(model)) != fingerprint:
            raise QuantizationError(
                f"calibration: made for other weights (fingerprint {fingerprint[:12]}, this model "
                f"has {found[:12]}); calibrate again"
            )
        layers = build_ranges(model, scheme, stored)
        return cls(scheme, layers, fingerprint, images)


def build_ranges(
    model: SwinTransformer,
    scheme: Scheme,
    activations: Mapping[str, tuple[float, tuple[float, ...]]],
) -> dict[str, LayerRange]:
    """Ranges of every layer from its ``(input_amax, output_amax)`` and its weights.

    Raises:
        QuantizationError: a layer without a range, or with one that is negative or not finite.
    """
    layers = quant_layers(model)
    _check_names(activations, layers)
    ranges = {
        name: LayerRange(
            name,
            scheme.layer(name),
            activations[name][0],
            activations[name][1],
            weight_amax(layer, scheme.layer(name)),
        )
        for name, layer in layers.items()
    }
    _check_complete(ranges, layers)
    return ranges


@torch.no_grad()
def weight_amax(layer: QuantLayer, scheme: LayerScheme) -> torch.Tensor:
    """Largest magnitude in each row of the folded weight, float32 ``[N]`` on the CPU."""
    rows = layer.folded(torch.float64)[0].abs().amax(dim=1).float().cpu()
    return rows.amax().expand(len(rows)).clone() if scheme.weight == "per_tensor" else rows


def scale_of(amax: float, format: Format) -> float:
    """The step of a range, rounded to float32; 1 for an all-zero tensor and a wide format."""
    if format == "wide" or amax == 0.0:
        return 1.0
    # a range below the smallest normal float would have an infinite inverse
    return float(max(np.float32(amax / LARGEST[format]), np.finfo(np.float32).tiny))


def inverse_of(scale: float) -> float:
    """``1 / scale`` rounded to float32: what quantising kernels multiply by."""
    return float(np.float32(1.0) / np.float32(scale))


@torch.no_grad()
def fingerprint_of(model: SwinTransformer) -> str:
    """SHA-256 of a model's configuration and weights as float32, whatever their dtype or device.

    Dropout rates are left out: they change no answer.
    """
    ignored = ("drop_rate", "attn_drop_rate", "drop_path_rate")
    config = {k: v for k, v in model.config.to_dict().items() if k not in ignored}
    digest = hashlib.sha256(repr(sorted(config.items())).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def output_parts(name: str) -> tuple[str, ...]:
    """What the output of a layer is ranged as: q, k and v of qkv apart, nothing of fc1."""
    kind = name.rpartition(".")[2]
    return {"qkv": ("q", "k", "v"), "fc1": ()}.get(kind, ("output",))


def _check_names(found: Iterable[str], layers: Mapping[str, QuantLayer]) -> None:
    present = set(found)
    if missing := [name for name in layers if name not in present]:
        raise QuantizationError(
            f"not calibrated: {len(missing)} of {len(layers)} layers have no range: "
            f"{', '.join(missing)}; run calibrate first"
        )
    if unknown := sorted(present - set(layers)):
        raise QuantizationError(f"calibration: layers that the model lacks: {', '.join(unknown)}")


def _check_complete(ranges: Mapping[str, LayerRange], layers: Mapping[str, QuantLayer]) -> None:
    _check_names(ranges, layers)
    bad = []
    for name, r in ranges.items():
        values = (r.input_amax, *r.output_amax)
        legal = len(r.output_amax) == len(output_parts(name))
        legal = legal and all(math.isfinite(v) and v >= 0 for v in values)
        legal = legal and len(r.weight_amax) == layers[name].linear.out_features
        if not (legal and bool(torch.isfinite(r.weight_amax).all())):
            bad.append(name)
    if bad:
        raise QuantizationError(
            f"calibration: ranges must be finite and at least 0; not so in {', '.join(bad)}"
        )

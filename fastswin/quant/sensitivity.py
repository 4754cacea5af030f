"""What each layer's quantisation costs, and which layers are worth it.

    snr_db   10 log10(sum y^2 / sum (y - y_q)^2) of the layer's own output, its input exact
    cosine   of the logits with fp32, when this layer alone is quantised
    top-1    and agreement with fp32, when this layer alone stays wide

:func:`choose_layers` turns that into a scheme: it drops what brings no speed, then keeps wide what
costs most until the rest is within a budget.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F

from fastswin.models.swin import SwinTransformer
from fastswin.quant.convert import QuantizedLinear, QuantizedSwin, quantize_linear
from fastswin.quant.layers import QuantLayer
from fastswin.quant.ranges import Calibration
from fastswin.quant.scheme import WIDE

Batch = tuple[torch.Tensor, torch.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Quantised logits beside fp32 ones.

    Attributes:
        images: how many.
        top1_percent: right answers; None without labels.
        agreement_percent: answers that are fp32's.
        cosine: mean over the images of the cosine between both logits.
        snr_db: signal-to-noise ratio of the logits.
    """

    images: int
    top1_percent: float | None
    agreement_percent: float
    cosine: float
    snr_db: float


@dataclasses.dataclass(frozen=True)
class LayerSensitivity:
    """What quantising one layer costs; see the module's definitions."""

    name: str
    snr_db: float
    alone: Accuracy
    all_but_this: Accuracy


@dataclasses.dataclass(frozen=True)
class SensitivityReport:
    """Layers by name, beside fp32 (its top-1) and the model with all layers quantised."""

    fp32_top1_percent: float | None
    quantized: Accuracy
    layers: dict[str, LayerSensitivity]

    def to_dict(self) -> dict[str, object]:
        """JSON-ready values."""
        return dataclasses.asdict(self)

    def ranked(self) -> list[LayerSensitivity]:
        """Layers from the most to the least harmful: by the logits' SNR of each alone."""
        return sorted(self.layers.values(), key=lambda layer: layer.alone.snr_db)


@dataclasses.dataclass(frozen=True)
class SpeedTable:
    """Measured times of layers on one card at one batch.

    Attributes:
        card: its name.
        batch: images per call.
        layers: name to ``(wide_us, quantized_us)``, what surrounds the product included.
    """

    card: str
    batch: int
    layers: dict[str, tuple[float, float]]

    @classmethod
    def load(cls, path: str | Path) -> SpeedTable:
        """Read a JSON object of these attributes; ValueError names the file if it is malformed."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            layers = {str(k): (float(a), float(b)) for k, (a, b) in values["layers"].items()}
            return cls(str(values["card"]), int(values["batch"]), layers)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"speed table {path}: malformed ({error})") from error

    def saved_us(self, name: str) -> float:
        """Time that quantising a layer saves; 0 where it was not measured."""
        wide, quantized = self.layers.get(name, (0.0, 0.0))
        return wide - quantized


class _Mixed(QuantizedSwin):
    """A quantised model in which any set of layers can be left wide."""

    def __init__(self, model: SwinTransformer, calibration: Calibration) -> None:
        super().__init__(model, calibration)
        self.wide: frozenset[str] = frozenset()
        self.floats: dict[str, QuantizedLinear] = {
            name: quantize_linear(layer, dataclasses.replace(calibration.layers[name], scheme=WIDE))
            for name, layer in self.layers.items()
        }
        self.noise: dict[str, list[float]] | None = None

    def linear(self, layer: QuantLayer, x: torch.Tensor) -> torch.Tensor:
        name = layer.name
        if self.noise is not None:  # exact inputs: compare, hand on the exact result
            exact = self.floats[name](x)
            signal, noise = self.noise.setdefault(name, [0.0, 0.0])
            difference = self.linears[name](x) - exact
            self.noise[name] = [
                signal + float(exact.double().square().sum()),
                noise + float(difference.double().square().sum()),
            ]
            return exact
        return (self.floats if name in self.wide else self.linears)[name](x)

    def pad_qkv(self, layer: QuantLayer) -> torch.Tensor | None:
        if self.noise is not None or layer.name in self.wide:
            return layer.bias
        return super().pad_qkv(layer)

    def run(self, images: torch.Tensor, wide: Iterable[str]) -> torch.Tensor:
        self.wide = frozenset(wide)
        return self(images)


@torch.no_grad()
def sensitivity(
    model: SwinTransformer,
    calibration: Calibration,
    batches: Iterable[Batch],
    *,
    on_layer: Callable[[str], None] | None = None,
) -> SensitivityReport:
    """Measure every quantised layer of a calibrated model.

    Args:
        model: the fp32 model.
        calibration: its ranges.
        batches: images ``[B, channels, h, w]`` and labels ``[B]`` or None; all are kept in memory
            and run twice a layer.
        on_layer: called with each layer's name when it is done.

    Raises:
        QuantizationError: ranges of other weights.
        ValueError: no images.
    """
    mixed = _Mixed(model, calibration)
    data = _Data(mixed, list(batches))
    names = [name for name, r in calibration.layers.items() if r.scheme.quantized]
    mixed.noise = {}
    for images, _ in data.batches:
        mixed(images)
    noise, mixed.noise = mixed.noise, None
    layers = {}
    for name in names:
        layers[name] = LayerSensitivity(
            name,
            _decibel(*noise[name]),
            data.accuracy(wide=set(names) - {name}),
            data.accuracy(wide={name}),
        )
        if on_layer is not None:
            on_layer(name)
    return SensitivityReport(data.fp32_top1_percent, data.accuracy(wide=()), layers)


@torch.no_grad()
def choose_layers(
    model: SwinTransformer,
    calibration: Calibration,
    batches: Iterable[Batch],
    *,
    budget_points: float = 0.3,
    min_cosine: float = 0.99,
    speed: SpeedTable | None = None,
    on_layer: Callable[[str], None] | None = None,
) -> Calibration:
    """Keep wide what costs accuracy or brings no speed.

    Layers that save no time go first. Then, while the rest is outside the budget, the layer goes
    that harms the logits most (per microsecond saved, where there is a speed table).

    Args:
        model, batches: as for :func:`sensitivity`.
        calibration: the ranges to start from.
        budget_points: largest legal loss in percentage points: of top-1 where there are labels,
            else of agreement with fp32, which no loss of top-1 can exceed.
        min_cosine: smallest legal mean cosine of the logits.
        speed: times of the layers on the card and batch in question; None goes by accuracy alone.
        on_layer: as for :func:`sensitivity`.

    Returns:
        The calibration with those layers wide, its scheme named ``<name>_auto``.
    """
    mixed = _Mixed(model, calibration)
    data = _Data(mixed, list(batches))
    quantized = [name for name, r in calibration.layers.items() if r.scheme.quantized]
    wide = {n for n in quantized if speed is not None and speed.saved_us(n) <= 0.0}
    if not data.within(data.accuracy(wide), budget_points, min_cosine):
        left = [name for name in quantized if name not in wide]
        harm = {}
        for name in left:
            alone = data.accuracy(wide=set(quantized) - {name})
            noise_power = 10.0 ** (-alone.snr_db / 10.0)
            harm[name] = noise_power / (speed.saved_us(name) if speed is not None else 1.0)
            if on_layer is not None:
                on_layer(name)
        for name in sorted(left, key=lambda n: -harm[n]):
            wide.add(name)
            if data.within(data.accuracy(wide), budget_points, min_cosine):
                break
    return keep_wide(calibration, wide, f"{calibration.scheme.name}_auto")


def keep_wide(calibration: Calibration, names: Iterable[str], scheme_name: str) -> Calibration:
    """The same ranges with some layers left wide; they need not be calibrated again.

    Raises:
        ValueError: a name that is no layer.
    """
    names = sorted(names)
    if unknown := [name for name in names if name not in calibration.layers]:
        raise ValueError(f"names: no such layers: {', '.join(unknown)}")
    scheme = calibration.scheme.override({name: WIDE for name in names}, scheme_name)
    layers = {
        name: dataclasses.replace(r, scheme=scheme.layer(name))
        for name, r in calibration.layers.items()
    }
    return dataclasses.replace(calibration, scheme=scheme, layers=layers)


class _Data:
    """Images, labels and the fp32 logits that everything is compared with."""

    def __init__(self, mixed: _Mixed, batches: list[Batch]) -> None:
        self.mixed = mixed
        device = next(mixed.model.parameters()).device
        self.batches = [(images.to(device), labels) for images, labels in batches]
        self.images = sum(len(images) for images, _ in self.batches)
        if not self.images:
            raise ValueError("batches: needs at least one image")
        with_labels = [labels is not None for _, labels in self.batches]
        if any(with_labels) != all(with_labels):
            raise ValueError("batches: give labels with all batches or with none")
        names = list(mixed.layers)
        self.expected = torch.cat([mixed.run(images, names) for images, _ in self.batches])
        self.labels = (
            torch.cat([labels.to(device) for _, labels in self.batches if labels is not None])
            if all(with_labels)
            else None
        )
        self.fp32_top1_percent = self._top1(self.expected)

    def accuracy(self, wide: Iterable[str]) -> Accuracy:
        logits = torch.cat([self.mixed.run(images, wide) for images, _ in self.batches])
        same = logits.argmax(1) == self.expected.argmax(1)
        difference = (logits - self.expected).double().square().sum()
        return Accuracy(
            self.images,
            self._top1(logits),
            100.0 * float(same.float().mean()),
            float(F.cosine_similarity(logits, self.expected).mean()),
            _decibel(float(self.expected.double().square().sum()), float(difference)),
        )

    def within(self, found: Accuracy, budget_points: float, min_cosine: float) -> bool:
        if self.fp32_top1_percent is not None and found.top1_percent is not None:
            loss = self.fp32_top1_percent - found.top1_percent
        else:
            loss = 100.0 - found.agreement_percent
        return loss <= budget_points + 1e-9 and found.cosine >= min_cosine

    def _top1(self, logits: torch.Tensor) -> float | None:
        if self.labels is None:
            return None
        return 100.0 * float((logits.argmax(1) == self.labels).float().mean())


def _decibel(signal: float, noise: float) -> float:
    """Signal-to-noise ratio in dB, 200 (beyond fp32) where there is no noise."""
    if noise <= 0.0:
        return 200.0
    return 10.0 * math.log10(max(signal, 1e-300) / noise)

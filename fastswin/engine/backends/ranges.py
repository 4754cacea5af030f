"""int8 ranges in the form that CPU runtimes take."""

from __future__ import annotations

from collections.abc import Mapping

from fastswin.quant import Calibration, LayerRange, QuantizationError


def graph_ranges(calibration: Calibration) -> Mapping[str, LayerRange]:
    """Ranges by layer name.

    Raises:
        QuantizationError: a layer's input has no static range.
    """
    for name, layer in calibration.layers.items():
        if layer.scheme.quantized and layer.scheme.activation != "per_tensor":
            raise QuantizationError(
                f"{name}: CPU runtimes need activation='per_tensor', the scheme "
                f"{calibration.scheme.name!r} says {layer.scheme.activation!r}"
            )
    return calibration.layers

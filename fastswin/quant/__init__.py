"""Quantisation: schemes, calibration, the integer reference, QAT, sensitivity."""

from fastswin.quant.calibrate import calibrate, calibration_of, observe
from fastswin.quant.convert import QuantizedSwin
from fastswin.quant.qat import QatModel, distillation_loss
from fastswin.quant.ranges import Calibration, LayerRange, QuantizationError
from fastswin.quant.scheme import PRESETS, WIDE, LayerScheme, Scheme, find_scheme
from fastswin.quant.sensitivity import SpeedTable, choose_layers, keep_wide, sensitivity
from fastswin.quant.storage import load_quantized, load_ranges, save_quantized, save_ranges

__all__ = [
    "PRESETS",
    "WIDE",
    "Calibration",
    "LayerRange",
    "LayerScheme",
    "QatModel",
    "QuantizationError",
    "QuantizedSwin",
    "Scheme",
    "SpeedTable",
    "calibrate",
    "calibration_of",
    "choose_layers",
    "distillation_loss",
    "find_scheme",
    "keep_wide",
    "load_quantized",
    "load_ranges",
    "observe",
    "save_quantized",
    "save_ranges",
    "sensitivity",
]

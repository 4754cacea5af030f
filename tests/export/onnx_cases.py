"""Small exported graphs that the tests share; each is written once a session."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from swin_references import our_model

from fastswin.export.onnx import ExportReport, export_onnx
from fastswin.models import SwinTransformer

#: A map of 12x16 and then 6x8 tokens; windows of 4 pad the second.
SIZE = (48, 64)
#: Maps of 18x26 and 9x13 tokens: nothing is a multiple of anything.
ODD = (70, 101)

#: Every kind of graph: model settings, then arguments of export_onnx.
CASES = {
    "v1": ({}, {}),
    "v2-unfolded": ({"version": 2}, {"fold": False}),
    "v1-fp16": ({}, {"precision": "fp16", "opset": "newest"}),
    "v2-standard": ({"version": 2}, {"attention": "standard", "opset": "newest"}),
    "v1-fastswin-odd-features": (
        {"window_convention": "torchvision"},
        {"attention": "fastswin", "image_size": ODD, "features": True},
    ),
    "v2-fastswin-fp16": ({"version": 2}, {"attention": "fastswin", "precision": "fp16"}),
    "v2-any-size": ({"version": 2}, {"dynamic_size": True}),
}


@functools.cache
def model_of(case: str) -> SwinTransformer:
    settings, _ = CASES[case]
    return our_model(**{"image_size": SIZE, "depths": (2, 1), **settings})


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@functools.cache
def exported(case: str) -> ExportReport:
    """The checked export of a case."""
    _, arguments = CASES[case]
    return export_onnx(model_of(case), Path(folder().name, f"{case}.onnx"), **arguments)


def images(batch: int, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(batch))

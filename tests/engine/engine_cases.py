"""Tiny models, images and comparisons that the engine tests share."""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import torch
from swin_references import our_model

from fastswin.engine import Engine, choice
from fastswin.engine.bind import bind
from fastswin.engine.forward import Forward
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.stage_plan import ModelPlan
from fastswin.models import SwinTransformer

#: Image whose maps (9x13, then 5x7) are no multiple of the patch, of a 4x4 window or of 2.
ODD = (34, 50)
TINY = {"embed_dim": 32, "num_heads": (2, 4), "image_size": ODD}


def tiny(version: int = 1, **settings) -> SwinTransformer:
    """Two stages, 32 and 64 channels, perturbed weights."""
    return our_model(version, **{**TINY, **settings})


def images_like(model: SwinTransformer, batch: int = 2, size: tuple[int, int] | None = None):
    """Distinct seeded images for a model."""
    size = size or model.config.image_size
    generator = torch.Generator().manual_seed(11)
    return torch.randn(batch, model.config.in_channels, *size, generator=generator)


def cpu_engine(source, precision: str = "fp32", **arguments) -> Engine:
    """On PyTorch unless another backend is named: the runtimes have tests of their own."""
    return Engine(source, precision, device="cpu", **{"backend": "torch", **arguments})


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return (actual.double() - expected.double()).abs().max().item()


@torch.no_grad()
def check_plan_in_fp16(model: SwinTransformer, plan: ModelPlan, ops: Any) -> None:
    """Logits under a plan, kernels stood in for by ``ops``, against fp64 and the model in fp16."""
    precision = PRECISIONS["fp16"]
    weights = prepare(model, torch.device("cpu"), torch.float16)
    forward = Forward(model.config, weights, precision, ops)
    images = images_like(model, 1)
    truth = copy.deepcopy(model).double()(images.double())
    eager = copy.deepcopy(model).half()(images.half()).double()
    logits = forward.logits(images.half(), bind(plan, weights, precision)).double()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()


@contextlib.contextmanager
def plan_limits(*, fused_qkv: bool, mlp_channels: int, mlp_min_tokens: int):
    """The planner with other thresholds, so that a tiny model takes a chosen branch."""
    limits = {128: 1 << 62} if fused_qkv else {}
    with (
        mock.patch.object(choice, "FUSED_QKV_TOKENS", limits),
        mock.patch.object(choice, "FUSED_MLP_CHANNELS", mlp_channels),
        mock.patch.object(choice, "FUSED_MLP_MIN_TOKENS", mlp_min_tokens),
    ):
        yield

"""The model instance that all contenders of a problem are made from.

timm's where timm is installed and knows the model, for that is what people run; otherwise this
package's readable model with its attention on the PyTorch reference, so that no kernel of ours
takes part in the answer it is checked against.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastswin import ops
from fastswin.bench.problems import Problem
from fastswin.models import SwinTransformer
from fastswin.models.swin import WindowAttention

WEIGHT_SEED = 1


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to be compared in several ways of running it.

    Attributes:
        model: fp32, eval mode, on the CPU, no gradients.
        engine_source: what :class:`fastswin.Engine` is built from: the same weights.
        framework: whose model it is, with version.
    """

    model: nn.Module
    engine_source: nn.Module
    framework: str


def build_source(problem: Problem) -> Source:
    """Build the problem's model with its checkpoint, or with seeded random weights.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: the checkpoint is a pickle that needs code, or its keys do not fit.
    """
    if problem.checkpoint is not None and not Path(problem.checkpoint).is_file():
        raise FileNotFoundError(f"checkpoint {problem.checkpoint!r} does not exist")
    timm_source = _timm_source(problem) if problem.config is None else None
    if timm_source is not None:
        return timm_source
    with torch.device("meta"):  # every parameter is written below and there are no buffers:
        model = SwinTransformer(problem.swin_config)
    model = model.to_empty(device="cpu")  # the usual initial numbers of a Swin-L take 6 s
    if problem.checkpoint is None:
        perturb_weights(model)
    else:
        _load(model, problem.checkpoint)
    _freeze(model)
    reference = _Reference(model)
    _freeze(reference)
    return Source(reference, model, "fastswin reference")


class SourceCache:
    """Keeps the last model built: building a large one takes seconds, two need twice the memory."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._source: Source | None = None

    def get(self, problem: Problem) -> Source:
        """The problem's model, whatever its dtype and batch; raises as :func:`build_source`."""
        key = (problem.model, problem.config, problem.checkpoint)
        if self._source is None or key != self._key:
            self._source = None
            self._source, self._key = build_source(problem), key
        return self._source


def perturb_weights(model: nn.Module, seed: int = WEIGHT_SEED) -> None:
    """Fill every parameter in place, away from its default, so activations stay near unit size.

    Matrices ``randn / sqrt(fan_in)``, norm weights ``1 + 0.2 randn``, vectors ``0.1 randn``,
    position tables ``0.5 randn``, V2's ``logit_scale`` ``ln 10 + 0.3 randn``.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            leaf = name.rpartition(".")[2]
            if leaf == "relative_position_bias_table":
                noise *= 0.5
            elif leaf == "logit_scale":
                noise = math.log(10.0) + 0.3 * noise
            elif parameter.ndim > 1:
                noise *= parameter[0].numel() ** -0.5
            elif leaf == "weight":
                noise = 1.0 + 0.2 * noise
            else:
                noise *= 0.1
            parameter.copy_(noise)


class _ReferenceAttention(nn.Module):
    """Window attention of the readable model with every operator on PyTorch."""

    def __init__(self, attention: WindowAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, shift_size: tuple[int, int]) -> torch.Tensor:
        attention = self.attention
        qkv_bias = attention.qkv_bias
        position: dict[str, Any] = attention.position_bias()
        out = ops.window_attention(
            F.linear(x, attention.qkv.weight, qkv_bias),
            num_heads=attention.num_heads,
            window_size=attention.window_size,
            shift_size=shift_size,
            scale=attention.scale,
            qkv_bias=qkv_bias,
            impl="reference",
            **position,
        )
        return attention.proj(out)


class _Reference(nn.Module):
    """A copy of the readable model with :class:`_ReferenceAttention` in every block."""

    def __init__(self, model: SwinTransformer) -> None:
        super().__init__()
        self.swin = copy.deepcopy(model)
        for layer in self.swin.layers:
            for block in layer.blocks:  # type: ignore[union-attr]
                block.attn = _ReferenceAttention(block.attn)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.swin(images)


def _timm_source(problem: Problem) -> Source | None:
    try:
        import timm
    except ImportError:
        return None
    name = problem.model.partition(".")[0]
    if not timm.is_model(name):
        return None
    # timm loads safetensors, or pickles with weights_only=True, and converts the official layout
    model = timm.create_model(name, checkpoint_path=problem.checkpoint or "")
    if problem.checkpoint is None:
        perturb_weights(model)
    _freeze(model)
    return Source(model, model, f"timm {timm.__version__}")


def _load(model: nn.Module, path: str) -> None:
    state: dict[str, Any]
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        state = dict(load_file(path))
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    state = state.get("model", state)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ValueError(f"checkpoint {path!r} does not fit: {' '.join(lines[:2])}") from None


def _freeze(model: nn.Module) -> None:
    model.eval().requires_grad_(False)

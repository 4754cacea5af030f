"""8-bit GEMMs of Swin's layers: operands, right answers, candidates and contenders.

qkv writes 8 bits with three steps, fc1 applies GELU and writes 8 bits, proj and fc2 add to an fp16
stream in place, reduction writes fp16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fastswin.bench.op_library_linear_problems import Layer, layers
from fastswin.models.variants import VARIANTS
from fastswin.ops.quantize.reference import LARGEST, inverse_of
from fastswin.ops.quantized_linear.config import (
    QuantizedGemmConfig,
    default_quantized_gemm_config,
)
from fastswin.ops.quantized_linear.ordering import order_rows
from fastswin.ops.quantized_linear.reference import product_ref
from fastswin.testing.steps import beyond_one_step, steps_apart, within_one_step

FORMATS: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

#: Kinds whose result is stored in 8 bits, with the number of its steps.
PARTS = {"qkv": 3, "fc1": 1}

#: Kinds that add to the residual stream.
RESIDUAL = ("proj", "fc2")

#: Of an H100.
MULTIPROCESSORS = 132

#: Relative RMS error of a wide result: fp16's rounding, and fast accumulation beside it.
WIDE_RMS = {"int8": 5e-4, "fp8": 4e-3}

#: Share of 8-bit results that may be one step off: GELU's formula, and fast accumulation.
STEPS_OFF = {"int8": 0.01, "fp8": 0.2}


@dataclasses.dataclass
class Operands:
    """One layer's tensors; ``device`` "meta" gives shapes for compiling."""

    layer: Layer
    format: str
    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    stream: torch.Tensor | None
    output_scale: torch.Tensor | None
    out: torch.Tensor
    _ordered: Any = None

    @classmethod
    def make(cls, layer: Layer, format: str, device: torch.device) -> Operands:
        """Seeded normal numbers; the product times scale is of order one."""
        M, N, K, dtype = layer.M, layer.N, layer.K, FORMATS[format]
        spread = 30.0 if format == "int8" else 1.0
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(M + N)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        def operand(*shape: int) -> torch.Tensor:
            numbers = randn(*shape).mul_(spread).clamp_(-LARGEST[dtype], LARGEST[dtype])
            return (numbers.round_() if format == "int8" else numbers).to(dtype)

        parts = PARTS.get(layer.kind)
        stored = torch.float16 if parts is None else dtype
        step = 4.5 / LARGEST[dtype]
        steps = None
        if parts is not None:
            steps = torch.arange(1, parts + 1, device=device) * 0.1 * step + step
        return cls(
            layer, format, operand(M, K), operand(N, K),
            (1 + 0.2 * randn(N).abs_()) / (spread * spread * math.sqrt(K)), randn(N) * 0.3,
            randn(M, N).half() if layer.kind in RESIDUAL else None, steps,
            torch.empty(M, N, dtype=stored, device=device),
        )  # fmt: skip

    def call(self, config: QuantizedGemmConfig) -> torch.Tensor:
        """One launch as the engine makes it; adds to ``out`` in place with a residual."""
        from fastswin.ops.quantized_linear.forward import quantized_linear_fwd

        narrow = self.output_scale is not None
        return quantized_linear_fwd(
            self.x, *(self.ordered() if narrow else (self.weight, self.scale, self.bias)), None,
            "gelu" if self.layer.kind == "fc1" else None,
            None if self.stream is None else self.out, self.output_scale, self.out.dtype, self.out,
            config, ordered=narrow,
        )  # fmt: skip

    def ordered(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight, scale and bias in the order in which 8-bit results are stored; made once."""
        key = self.weight.data_ptr(), self.scale.data_ptr(), self.scale._version
        if self._ordered is None or self._ordered[0] != key:
            self._ordered = key, tuple(map(order_rows, (self.weight, self.scale, self.bias)))
        return self._ordered[1]

    def reset(self) -> None:
        """``out`` before a launch: the stream, or a poison in every byte."""
        if self.stream is not None:
            self.out.copy_(self.stream)
        else:
            self.out.view(torch.uint8).fill_(0x7F)

    def expected(self) -> torch.Tensor:
        """fp32 answer ``[M, N]``, in steps where the result is stored in 8 bits."""
        y = product_ref(self.x, self.weight).mul_(self.scale).add_(self.bias)
        if self.layer.kind == "fc1":
            y = F.gelu(y)
        if self.output_scale is not None:
            inverse = inverse_of(self.output_scale)
            y *= inverse.repeat_interleave(self.layer.N // len(inverse))
        return y if self.stream is None else y.add_(self.stream)

    def wrong(self, expected: torch.Tensor) -> str:
        """Why ``out`` is not the answer, nothing where it is."""
        if self.output_scale is None:
            error = (self.out.float() - expected).square().mean().sqrt()
            relative = (error / expected.square().mean().sqrt()).item()
            return "" if relative <= WIDE_RMS[self.format] else f"rms error {relative:.2e}"
        dtype = FORMATS[self.format]
        clamped = expected.clamp(-LARGEST[dtype], LARGEST[dtype])
        stored = (clamped.round() if self.format == "int8" else clamped).to(dtype)
        steps = steps_apart(self.out, stored)
        off = (steps > 0).float().mean().item()
        if off > STEPS_OFF[self.format] or not within_one_step(self.out, stored):
            far = beyond_one_step(self.out, stored)
            return f"{int(steps.max())} steps off, {far:.1e} of the RMS, {100 * off:.2f} % differ"
        return ""

    def contenders(self) -> dict[str, Callable[[], object]]:
        """fp16 by the library, and fp8 by the library where PyTorch offers it."""
        layer, device = self.layer, self.x.device
        x = torch.randn(layer.M, layer.K, device=device).half()
        weight = (torch.randn(layer.N, layer.K, device=device) * layer.K**-0.5).half()
        bias, calls = self.bias.half(), dict[str, Callable[[], object]]()
        if self.stream is not None:
            stream = self.stream.clone()
            calls["fp16 addmm_"] = lambda: torch.addmm(stream, x, weight.t(), out=stream)
        elif layer.kind == "fc1":
            calls["fp16 linear+gelu"] = lambda: torch._addmm_activation(
                bias, x, weight.t(), use_gelu=True
            )
        else:
            calls["fp16 linear"] = lambda: F.linear(x, weight, bias)
        if self.format == "fp8":
            one = torch.ones((), device=device)
            calls["_scaled_mm plain"] = lambda: torch._scaled_mm(
                self.x, self.weight.t(), one, one, out_dtype=torch.float16, use_fast_accum=True
            )
        return calls


def quantized_layers(models: list[str], batches: list[int]) -> Iterator[Layer]:
    """The four GEMMs of every stage, and the mergings, by batch and model."""
    from fastswin.bench.op_library_linear_problems import MODELS

    for batch in batches:
        yield from layers(models, [batch])
        for model in models:
            config = VARIANTS[MODELS[model]]
            for stage in range(config.num_stages - 1):
                H, W = config.map_size(stage + 1, (224, 224))
                C = config.dim(stage)
                yield Layer(f"{model}{stage + 1} b{batch}", "merge", batch * H * W, 2 * C, 4 * C)


def candidates(layer: Layer, format: str) -> list[QuantizedGemmConfig]:
    """Configurations worth a try, the heuristic's choice first."""
    Config = QuantizedGemmConfig
    found: list[QuantizedGemmConfig] = []
    if layer.M >= 1024:
        found += [
            Config(128, 128, 128, 4, 3, True, 2), Config(128, 128, 64, 4, 4, True, 2),
            Config(64, 128, 128, 4, 3, True), Config(64, 128, 128, 4, 4, True),
            Config(128, 64, 128, 4, 3, True, 3), Config(128, 64, 64, 4, 4, True, 3),
            Config(128, 256, 128, 8, 3, True, 1), Config(64, 256, 128, 4, 3, True, 1),
            Config(64, 128, 64, 4, 4, True),
        ]  # fmt: skip
    if layer.M <= 8192:
        found += [
            Config(64, 64, 128, 4, 4, True), Config(64, 64, 256, 4, 3, True),
            Config(64, 32, 128, 4, 4, True), Config(64, 32, 256, 4, 4, True),
            Config(32, 32, 256, 4, 4, True), Config(16, 32, 256, 4, 4, True),
            Config(16, 64, 256, 4, 4, True),
        ]  # fmt: skip
    if layer.kind in PARTS:  # the tile may leave through the copy engine
        through = [dataclasses.replace(c, tma_store=True) for c in found if c.block_m >= 64]
        found += [c for c in through if c.block_n >= 64]
    useful = [c for c in found if c.block_k <= max(64, 2 * layer.K) and _useful(c, layer)]
    return list(dict.fromkeys([default_config(layer, format), *useful]))


def default_config(layer: Layer, format: str) -> QuantizedGemmConfig:
    """The heuristic's choice on an H100."""
    return default_quantized_gemm_config(
        layer.M, layer.N, layer.K, MULTIPROCESSORS, (9, 0), layer.kind in PARTS,
        layer.kind in RESIDUAL, gelu=layer.kind == "fc1", fp8=format == "fp8",
    )  # fmt: skip


def _useful(config: QuantizedGemmConfig, layer: Layer) -> bool:
    """Whether a tile is not mostly padding."""
    return config.block_n < max(65, 2 * layer.N) and config.block_m <= max(64, 2 * layer.M)


def describe(config: QuantizedGemmConfig) -> str:
    """A configuration in a few characters."""
    text = f"{config.block_m}x{config.block_n}x{config.block_k} w{config.num_warps}"
    text += f" s{config.num_stages}"
    text += f" p{config.persistent}" if config.persistent else ""
    return text + (" store" if config.tma_store else "")

"""Matrix products of Swin's layers as the library could run them, and what they are compared with.

A :class:`Layer` is one GEMM of one stage; a :class:`Variant` is a format and an epilogue of it. The
first probe takes every combination of formats and epilogues on one shape, to tell which exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastswin.models.variants import VARIANTS
from fastswin.ops.library_linear.problem import FP8

#: Models by short name, the largest first: it has most to gain.
MODELS = {
    "L": "swin_large_patch4_window7_224",
    "B": "swin_base_patch4_window7_224",
    "T": "swin_tiny_patch4_window7_224",
}

BATCHES = (32, 1)

#: Largest relative RMS error by (operands, output). fp16: one rounding is 2.9e-4. fp8 operands:
#: fast accumulation adds 1e-3 to 2e-3. fp8 output: one rounding is 2.6e-2.
RMS_BOUNDS = {
    (torch.float16, torch.float16): 5e-4,
    (torch.bfloat16, torch.bfloat16): 4e-3,
    (FP8, torch.float16): 4e-3,
    (FP8, torch.bfloat16): 6e-3,
    (FP8, FP8): 3.5e-2,
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """One linear layer: ``M`` rows, ``N`` output and ``K`` input channels."""

    case: str
    kind: str
    M: int
    N: int
    K: int


@dataclasses.dataclass(frozen=True)
class Variant:
    """A format and epilogue.

    Attributes:
        name: as printed.
        dtype: of operands.
        out_dtype: of the output.
        bias, gelu, residual: what follows; the residual is updated in place.
        by_channel: scales per row and channel instead of one.
    """

    name: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool = True
    gelu: bool = False
    residual: bool = False
    by_channel: bool = False


FP16 = torch.float16
BF16 = torch.bfloat16

#: What the engine could use, by kind of layer.
VARIANTS_OF = {
    "qkv": (
        Variant("fp16 bias", FP16, FP16),
        Variant("fp8 bias", FP8, FP16),
        Variant("fp8 bias >fp8", FP8, FP8),
    ),
    "proj": (
        Variant("fp16 bias+res", FP16, FP16, residual=True),
        Variant("fp16 res", FP16, FP16, bias=False, residual=True),
        Variant("fp8 bias+res", FP8, FP16, residual=True),
    ),
    "fc1": (
        Variant("fp16 bias", FP16, FP16),
        Variant("fp8 bias >fp8", FP8, FP8),
        Variant("fp8 bias+gelu >fp8", FP8, FP8, gelu=True),
    ),
    "fc2": (
        Variant("fp16 bias+res", FP16, FP16, residual=True),
        Variant("fp16 res", FP16, FP16, bias=False, residual=True),
        Variant("fp8 bias+res", FP8, FP16, residual=True),
        Variant("fp8 res", FP8, FP16, bias=False, residual=True),
    ),
}

#: One layer on which every combination is tried.
PROBE = Layer("probe", "any", 1568, 768, 768)


def probe_variants() -> Iterator[Variant]:
    """Every combination of formats and epilogues that the operator's arguments can say."""
    for bias in (True, False):
        for residual in (False, True):
            for dtype in (FP16, BF16):
                yield _named(dtype, dtype, bias, False, residual)
                yield _named(FP8, dtype, bias, False, residual)
                yield dataclasses.replace(
                    _named(FP8, dtype, bias, False, residual, suffix=" rowwise"), by_channel=True
                )
        for gelu in (False, True):
            yield _named(FP8, FP8, bias, gelu, False)


def _named(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: bool,
    gelu: bool,
    residual: bool,
    suffix: str = "",
) -> Variant:
    words = {FP16: "fp16", BF16: "bf16", FP8: "fp8"}
    epilogue = "+".join(
        word for word, on in (("bias", bias), ("gelu", gelu), ("res", residual)) if on
    )
    name = f"{words[dtype]} {epilogue or 'plain'} >{words[out_dtype]}{suffix}"
    return Variant(name, dtype, out_dtype, bias, gelu, residual)


def layers(models: list[str], batches: list[int]) -> Iterator[Layer]:
    """The GEMMs of every stage, by batch and model."""
    for batch in batches:
        for model in models:
            config = VARIANTS[MODELS[model]]
            for stage in range(config.num_stages):
                H, W = config.map_size(stage, (224, 224))
                C, hidden, M = config.dim(stage), config.hidden_dim(stage), batch * H * W
                for kind, N, K in (
                    ("qkv", 3 * C, C), ("proj", C, C), ("fc1", hidden, C), ("fc2", C, hidden),
                ):  # fmt: skip
                    yield Layer(f"{model}{stage + 1} b{batch}", kind, M, N, K)


@dataclasses.dataclass
class Inputs:
    """Operands of a layer on one device.

    ``x [M, K]`` and ``weight [N, K]`` are e4m3 and ``factor`` is a power of two, so that all
    formats have one answer; ``product = factor * x @ weight.T`` ``[M, N]`` in fp32 is of order one,
    ``bias`` and ``stream`` as well.
    """

    layer: Layer
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    stream: torch.Tensor
    product: torch.Tensor
    factor: float

    @classmethod
    def make(cls, layer: Layer, device: torch.device) -> Inputs:
        """Seeded normal numbers."""
        generator = torch.Generator(device).manual_seed(layer.M + layer.N + layer.K)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        x = randn(layer.M, layer.K).to(FP8)
        weight = randn(layer.N, layer.K).to(FP8)
        factor = 2.0 ** -round(math.log2(layer.K) / 2)
        product = (x.float() @ weight.float().t()).mul_(factor)
        bias, stream = randn(layer.N).half().float(), randn(layer.M, layer.N).half()
        return cls(layer, x, weight, bias, stream, product, factor)

    def expected(self, variant: Variant) -> torch.Tensor:
        """fp32 answer ``[M, N]``, unquantised."""
        y = self.product
        if variant.bias:  # in the dtype that the operator gets it in
            y = y + self.bias.to(self.bias_dtype(variant)).float()
        if variant.residual:
            y = y + self.stream.to(variant.out_dtype).float()
        if variant.gelu:
            y = torch.nn.functional.gelu(y, approximate="tanh")
        return y

    def arguments(self, variant: Variant, step: float) -> dict[str, Any]:
        """Keyword arguments of ``library_linear``, without residual and out.

        Args:
            variant: format and epilogue.
            step: of an fp8 output.
        """
        device = self.x.device
        made: dict[str, Any] = {
            "bias": self.bias.to(self.bias_dtype(variant)) if variant.bias else None,
            "activation": "gelu" if variant.gelu else None,
            "out_dtype": variant.out_dtype,
        }
        if variant.dtype == FP8:
            made |= {"x": self.x, "weight": self.weight}
            size = self.layer.N if variant.by_channel else 1
            made["scale"] = torch.full((size,), self.factor, device=device)
            if variant.by_channel:
                made["row_scale"] = torch.ones(self.layer.M, device=device)
        else:
            made |= {"x": self.x.to(variant.dtype), "weight": self.scaled_weight(variant.dtype)}
        if variant.out_dtype == FP8:
            made["output_inverse"] = torch.full((1,), 1 / step, device=device)
        return made

    @staticmethod
    def bias_dtype(variant: Variant) -> torch.dtype:
        """dtype of the bias: the output's, fp16 where that is fp8."""
        return FP16 if variant.out_dtype == FP8 else variant.out_dtype

    def scaled_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight times the factor in a half-precision format, exact."""
        return (self.weight.float() * self.factor).to(dtype)

    def contenders(self, variant: Variant) -> dict[str, Callable[[], object]]:
        """What PyTorch offers for this layer today, by name."""
        stream = self.stream.clone()
        if variant.dtype == FP8:
            one = torch.ones((), device=self.x.device)
            scale = torch.full((), self.factor, device=self.x.device)
            bias = self.bias.to(FP16) if variant.bias else None
            weight = self.weight.t()
            return {
                "_scaled_mm": lambda: torch._scaled_mm(
                    self.x, weight, scale, one, bias=bias, out_dtype=FP16, use_fast_accum=True
                )
            }
        x, weight = self.x.to(variant.dtype), self.scaled_weight(variant.dtype)
        if variant.residual:
            return {"addmm_": lambda: torch.addmm(stream, x, weight.t(), out=stream)}
        bias = self.bias.to(variant.dtype)
        return {"linear": lambda: torch.nn.functional.linear(x, weight, bias)}

"""Layers of a stage with few rows, and the forms in which they run: library, tiled, fused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fastswin import ops
from fastswin._triton.tiles import cdiv
from fastswin.bench.compile_ahead import compile_launches
from fastswin.ops.linear.config import GemmConfig, OneShotConfig

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Layer:
    """One product of a block.

    Attributes:
        name: "qkv", "proj", "fc1", "fc2" or "merge".
        side: tokens along one side of the (input) map.
        batch, C: images and channels of the stage.
    """

    name: str
    batch: int
    side: int
    C: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, output and input channels of the product."""
        M, C = self.batch * self.side**2, self.C
        if self.name == "merge":
            return self.batch * cdiv(self.side, 2) ** 2, 2 * C, 4 * C
        N, K = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (1, 4)}[self.name]
        return M, N * C, K * C

    @property
    def normalised(self) -> bool:
        return self.name in ("qkv", "fc1", "merge")

    @property
    def accumulates(self) -> bool:
        return self.name in ("proj", "fc2")

    @property
    def parts(self) -> int:
        """Products that a one-shot program makes side by side: one a neighbour, or the one."""
        return 4 if self.name == "merge" else 1


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to run a layer: "library", "tiled", "fused" (LayerNorm inside), and its tiles."""

    kind: str
    config: Any
    pdl: bool

    def __str__(self) -> str:
        values = "" if self.config is None else dataclasses.astuple(self.config)
        short = type(self.config).__name__.removesuffix("Config") if self.config else ""
        return f"{self.kind} {short}{values} {'pdl' if self.pdl else ''}".strip()


class Tensors:
    """Inputs of a layer on a device ("meta" for compiling), with ``copies`` weights."""

    def __init__(self, layer: Layer, device: torch.device, copies: int = 1) -> None:
        M, N, K = layer.shape
        generator = torch.Generator("cpu").manual_seed(M + 7 * N + 31 * K)

        def randn(*shape: int, spread: float = 1.0, to: torch.dtype = torch.float16) -> Any:
            if device.type == "meta":
                return torch.empty(*shape, device=device, dtype=to)
            return (spread * torch.randn(*shape, generator=generator)).to(device, to)

        self.layer = layer
        first = randn(N, K, spread=K**-0.5)
        self.weights = [first, *(first.clone() for _ in range(copies - 1))]
        self.bias = randn(N, spread=0.5, to=torch.float32)
        self.library_bias = self.bias.half()
        self.offset = randn(layer.C, spread=0.5, to=torch.float32) if layer.normalised else None
        width = layer.C if layer.normalised else K
        side = layer.side
        self.x = randn(layer.batch, side, side, width)
        self.residual = randn(M, N) if layer.accumulates else None
        self.out = torch.empty(M, N, device=device, dtype=torch.float16)

    def run(self, form: Form, weight: torch.Tensor) -> None:
        """One layer into ``out``, as the engine has it; ``out`` accumulates for proj and fc2."""
        from fastswin.ops.layer_norm.forward import layer_norm_fwd
        from fastswin.ops.linear.one_shot import one_shot_linear_fwd
        from fastswin.ops.patch_merging.forward import gather_neighbours_fwd

        layer, pdl = self.layer, form.pdl
        if layer.name == "merge" and form.kind == "fused":
            result = one_shot_linear_fwd(
                self.x, weight, self.bias, None, EPS, self.offset, None, None, form.config, pdl,
                gather=True,
            )  # fmt: skip
            self.out = result.view(self.out.shape)
            return
        x = self.x.view(-1, self.x.shape[-1])
        if layer.accumulates:
            if form.kind == "library":
                torch.addmm(self.out, x, weight.t(), out=self.out)
            else:
                _product(form, x, weight, self.bias, None, None, None, self.out, self.out)
            return
        gelu = "gelu" if layer.name == "fc1" else None
        if form.kind == "fused":
            _product(form, x, weight, self.bias, gelu, EPS, self.offset, None, self.out)
            return
        if layer.name == "merge":
            h = gather_neighbours_fwd(self.x, EPS, self.offset, pdl=pdl)
        else:
            h = layer_norm_fwd(x, None, None, EPS, self.offset, None, None, pdl=pdl)
        h = h.view(-1, h.shape[-1])
        if form.kind == "tiled":
            _product(form, h, weight, self.bias, gelu, None, None, None, self.out)
        else:
            torch.addmm(self.library_bias, h, weight.t(), out=self.out)

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """The layer in plain PyTorch, in ``dtype``."""
        x, weight = self.x.to(dtype), self.weights[0].to(dtype)
        offset = None if self.offset is None else self.offset.to(dtype)
        bias = self.bias.to(dtype)
        if self.layer.name == "merge":
            y = ops.merge_neighbours(
                x, weight, bias, layer_norm_eps=EPS, offset=offset, impl="reference"
            )
            return y.view_as(self.out)
        gelu: Any = "gelu" if self.layer.name == "fc1" else None
        residual = None if self.residual is None else self.residual.to(dtype)
        y = ops.linear(
            x.view(-1, x.shape[-1]), weight, bias, activation=gelu, residual=residual,
            layer_norm_eps=EPS if self.layer.normalised else None, offset=offset,
            impl="reference",
        )  # fmt: skip
        return y


def _product(
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    gelu: str | None,
    eps: float | None,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """One of our GEMMs, past the public function, which refuses tensors without data."""
    from fastswin.ops.linear.forward import layer_norm_linear_fwd, linear_fwd
    from fastswin.ops.linear.one_shot import one_shot_linear_fwd

    config, pdl = form.config, form.pdl
    if isinstance(config, OneShotConfig):
        one_shot_linear_fwd(x, weight, bias, gelu, eps, offset, residual, out, config, pdl)
    elif isinstance(config, GemmConfig):
        linear_fwd(x, weight, bias, gelu, residual, out, config, pdl)
    elif eps is not None:
        layer_norm_linear_fwd(x, weight, bias, gelu, eps, offset, out, config, pdl)


def compile_form(job: tuple[Layer, Form]) -> str | None:
    """Compile what a form launches, in this process; None, or what went wrong."""
    layer, form = job

    def launch() -> None:
        tensors = Tensors(layer, torch.device("meta"))
        tensors.run(form, tensors.weights[0])

    return compile_launches(launch, form.pdl)

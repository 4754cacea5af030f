"""The problems of the softmax suite: shapes, inputs, the same formula in eager, and live bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch

from fastswin.ops.masked_softmax import (
    grouped_tril_softmax,
    masked_softmax,
    scaled_masked_softmax,
    window_softmax,
)

Kind = Literal["masked", "window", "tril", "rows"]

SCALE = 0.125

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

#: Elements that the check takes in fp64 at a time.
CHECK_ELEMENTS = 2**26


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Tensors of one call; ``lens`` and ``mask`` never need a gradient."""

    x: torch.Tensor
    grad: torch.Tensor
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    lens: torch.Tensor | None = None

    def slice(self, part: slice) -> Inputs:
        """Some samples; bias and masks that are shared stay whole."""
        per_sample = self.mask is not None and self.mask.ndim == 4
        return Inputs(
            self.x.detach()[part],
            self.grad[part],
            self.bias,
            self.mask[part] if per_sample and self.mask is not None else self.mask,
            None if self.lens is None else self.lens[part],
        )

    def to(self, dtype: torch.dtype) -> Inputs:
        """Floating tensors in another dtype."""

        def cast(t: torch.Tensor | None) -> torch.Tensor | None:
            return t if t is None or not t.dtype.is_floating_point else t.detach().to(dtype)

        return Inputs(
            self.x.detach().to(dtype), self.grad.to(dtype), cast(self.bias), cast(self.mask),
            self.lens,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SoftmaxProblem:
    """One row of the suite.

    Attributes:
        kind: which operator.
        shape: of x.
        dtype: key of :data:`DTYPES`.
        windows: nW of a window problem.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: str = "fp16"
    windows: int = 1

    @property
    def case(self) -> str:
        return f"{self.kind}_{'x'.join(map(str, self.shape))}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def make(self, device: torch.device, seed: int) -> Inputs:
        """Random inputs, the same for one seed on one device type."""
        rng = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device=device, dtype=self.torch_dtype)

        x, grad = randn(*self.shape), randn(*self.shape)
        if self.kind == "masked":
            mask = torch.rand(self.shape[0], 1, *self.shape[2:], generator=rng, device=device)
            return Inputs(x, grad, mask=mask < 0.2)
        if self.kind == "window":
            n, regions = self.shape[2], 3
            region = torch.randint(0, regions, (self.windows, n), generator=rng, device=device)
            apart = region[:, None, :] != region[:, :, None]
            mask = torch.zeros(apart.shape, device=device, dtype=self.torch_dtype)
            return Inputs(x, grad, randn(*self.shape[1:]), mask.masked_fill_(apart, -100.0))
        if self.kind == "tril":
            size = self.shape[-1]
            lens = torch.randint(size // 2, size + 1, self.shape[:1], generator=rng, device=device)
            return Inputs(x, grad, lens=lens)
        return Inputs(x, grad)

    def chunks(self) -> list[slice]:
        """Slices of the leading axis for the check, whole images of a window problem."""
        row = math.prod(self.shape[1:])
        step = max(1, CHECK_ELEMENTS // row)
        if self.kind == "window":
            step = max(1, step // self.windows) * self.windows
        return [slice(i, i + step) for i in range(0, self.shape[0], step)]

    def live_bytes(self, inputs: Inputs, direction: str) -> int:
        """Bytes that an ideal kernel moves: live elements once, every output element once."""
        itemsize = inputs.x.element_size()
        read = inputs.x.numel()
        if self.kind == "tril" and inputs.lens is not None:
            lens = inputs.lens.to(torch.int64)
            read = int((lens * (lens + 1) // 2).sum()) * self.shape[1]
        if direction == "backward":
            sums = 0 if inputs.bias is None else inputs.bias.nbytes
            return (2 * read + inputs.x.numel()) * itemsize + sums
        shared = sum(t.nbytes for t in (inputs.bias, inputs.mask) if t is not None)
        return (read + inputs.x.numel()) * itemsize + shared

    def fastswin(self, inputs: Inputs) -> torch.Tensor:
        """The operator under test, as a user calls it."""
        if self.kind == "masked":
            return scaled_masked_softmax(inputs.x, inputs.mask, SCALE)
        if self.kind == "window":
            return window_softmax(inputs.x, inputs.bias, inputs.mask)
        if self.kind == "tril" and inputs.lens is not None:
            return _unchecked_tril(inputs.x, inputs.lens)
        return masked_softmax(inputs.x)

    def eager(self, inputs: Inputs) -> torch.Tensor:
        """The formula as people write it, in the inputs' dtype."""
        return self.eager_function(inputs.x, inputs.bias, inputs.mask, inputs.lens)

    def eager_function(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        mask: torch.Tensor | None,
        lens: torch.Tensor | None,
    ) -> torch.Tensor:
        """:meth:`eager` on plain tensors, for ``torch.compile``."""
        if self.kind == "masked" and mask is not None:
            return (x * SCALE).masked_fill(mask, -math.inf).softmax(-1)
        if self.kind == "window" and mask is not None and bias is not None:
            windows, heads, n, _ = x.shape
            scores = (x + bias).view(-1, mask.shape[0], heads, n, n) + mask[:, None]
            return scores.view(windows, heads, n, n).softmax(-1)
        if self.kind == "tril" and lens is not None:
            position = torch.arange(x.shape[-1], device=x.device)
            row, key = position[:, None], position[None, :]
            inside = row < lens[:, None, None, None]
            keep = (key <= row) & inside
            scores = x.masked_fill(~keep, -math.inf).masked_fill(~inside, 0.0)
            return scores.softmax(-1).masked_fill(~inside, 0.0)
        return x.softmax(-1)


def _unchecked_tril(x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """The operator below its argument checks, which read the lengths back from the GPU."""
    if not x.is_cuda:
        return grouped_tril_softmax(x, lens)
    return torch.ops.fastswin.masked_softmax_fwd(x, None, None, lens, 1.0, True, "triton")


#: In the order of the issue's table.
PROBLEMS: tuple[SoftmaxProblem, ...] = (
    SoftmaxProblem("masked", (32, 16, 1024, 1024)),
    SoftmaxProblem("masked", (32, 16, 2048, 2048)),
    SoftmaxProblem("masked", (1, 8, 1024, 1024)),
    SoftmaxProblem("window", (12288, 4, 49, 49), windows=64),
    SoftmaxProblem("window", (4096, 3, 49, 49), windows=64),
    SoftmaxProblem("window", (4096, 4, 144, 144), windows=64),
    SoftmaxProblem("tril", (12, 64, 1000, 1000), "fp32"),
    SoftmaxProblem("tril", (3, 64, 1000, 1000), "fp32"),
    SoftmaxProblem("rows", (8192, 16384)),
    SoftmaxProblem("rows", (2048, 131072)),
)

"""How fast the card could possibly be: floor of a Swin forward from two measured ceilings.

    roofline_ms = max(FLOPs / GEMM rate, bytes / copy rate)

FLOPs are those of the matrix products (2 per multiply-add), the convention of the papers' tables.
Bytes are those of a fused plan that keeps everything but the residual stream on chip, plus the
weights once. Both ceilings are measured in the run that they judge.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import torch

from fastswin.bench.precision import fp32_scope
from fastswin.bench.problems import PRECISIONS
from fastswin.bench.timing import Candidate, Timing, make_clock, measure
from fastswin.engine.precision import QUANTIZED
from fastswin.models import SwinConfig

#: Bytes to copy: far beyond any L2, 2 GiB on a GPU.
COPY_BYTES = {"cuda": 2**31, "cpu": 2**26}

#: Side of the square GEMM.
GEMM_SIDE = {"cuda": 8192, "cpu": 512}

#: Units of ``tokens * C`` elements that a block moves through memory, design section 3: five
#: kernels (qkv 1 + 3, attention 3 + 1, proj 2 + 1, fc1 1 + 4, fc2 4 + 1 + 1), or the least, one
#: kernel per half (attention half 1 + 1, MLP half 1 + 1 + the residual read again).
BLOCK_UNITS: dict[int, int] = {5: 22, 2: 5}


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device reaches today.

    Attributes:
        copy_tbs: device-to-device copy, bytes read plus bytes written, in TB/s.
        gemm_tflops: large square product per precision, in TFLOP/s.
    """

    copy_tbs: float
    gemm_tflops: dict[str, float]


def measure_ceilings(device: torch.device, dtypes: Sequence[str], seconds: float = 0.3) -> Ceilings:
    """Measure the copy rate and one GEMM rate per precision, on random data.

    Args:
        device: a GPU, or the CPU (small sizes).
        dtypes: keys of :data:`~fastswin.bench.problems.PRECISIONS`.
        seconds: time to spend on each.
    """
    rates = {dtype: _gemm_tflops(device, dtype, seconds) for dtype in dict.fromkeys(dtypes)}
    return Ceilings(_copy_tbs(device, seconds), rates)


def swin_flops(config: SwinConfig, batch: int) -> int:
    """Floating-point operations of the matrix products of one forward.

    Attention counts whole windows, padding included, as the kernels compute it.

    Args:
        config: the model, at its own image size.
        batch: images.
    """
    H, W = config.map_size(0)
    patch = config.in_channels * config.patch_size**2
    macs = H * W * patch * config.embed_dim
    for stage, depth in enumerate(config.depths):
        H, W = config.map_size(stage)
        C, tokens = config.dim(stage), H * W
        height, width = config.stage_window(stage)
        windows = math.ceil(H / height) * math.ceil(W / width)
        linear = tokens * C * (4 * C + 2 * config.hidden_dim(stage))
        attention = 2 * windows * (height * width) ** 2 * C
        macs += depth * (linear + attention)
        if stage + 1 < config.num_stages:
            H, W = config.map_size(stage + 1)
            macs += H * W * 4 * C * 2 * C
    macs += config.num_features * config.num_classes
    return 2 * batch * macs


def swin_weights(config: SwinConfig) -> int:
    """Elements of the weight matrices and position tables that one forward reads."""
    total = config.in_channels * config.patch_size**2 * config.embed_dim
    for stage, depth in enumerate(config.depths):
        C = config.dim(stage)
        height, width = config.stage_window(stage)
        table = (2 * height - 1) * (2 * width - 1) * config.num_heads[stage]
        total += depth * (C * (4 * C + 2 * config.hidden_dim(stage)) + table)
        if stage + 1 < config.num_stages:
            total += 4 * C * 2 * C
    return total + config.num_features * config.num_classes


def swin_fused_bytes(
    config: SwinConfig, batch: int, itemsize: int, kernels_per_block: Literal[2, 5] = 5
) -> int:
    """Bytes through device memory of one forward under the fused plan, weights once.

    Args:
        config: the model, at its own image size.
        batch: images.
        itemsize: bytes per element of weights and activations.
        kernels_per_block: 5 for the general plan, 2 for the least that fusion can reach.
    """
    H, W = config.map_size(0)
    images = config.in_channels * H * W * config.patch_size**2
    elements = images + H * W * config.embed_dim
    for stage, depth in enumerate(config.depths):
        H, W = config.map_size(stage)
        stream = H * W * config.dim(stage)
        elements += depth * BLOCK_UNITS[kernels_per_block] * stream
        if stage + 1 < config.num_stages:
            H, W = config.map_size(stage + 1)
            elements += stream + H * W * config.dim(stage + 1)
    elements += stream + config.num_features + config.num_classes
    return itemsize * (batch * elements + swin_weights(config))


def roofline_ms(
    config: SwinConfig,
    batch: int,
    dtype: str,
    ceilings: Ceilings,
    storage: torch.dtype | None = None,
) -> float:
    """Floor of one forward in ms.

    The bytes are those of two kernels a block, not five: a floor that a better fusion could pass
    would flatter everybody.

    Args:
        config, batch: the problem.
        dtype: precision; must be among the measured GEMM rates.
        ceilings: measured in the same run.
        storage: of activations and weights, None that of the precision; 8-bit layers count as if
            they were stored so too, since the residual stream is.
    """
    itemsize = torch.empty((), dtype=storage or PRECISIONS[dtype][0]).element_size()
    compute_ms = swin_flops(config, batch) / ceilings.gemm_tflops[dtype] * 1e-9
    memory_ms = swin_fused_bytes(config, batch, itemsize, 2) / ceilings.copy_tbs * 1e-9
    return max(compute_ms, memory_ms)


def _copy_tbs(device: torch.device, seconds: float) -> float:
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    latency_ms = _median_ms(lambda: target.copy_(source), device, seconds)
    return 2 * COPY_BYTES[device.type] / latency_ms * 1e-9


def _gemm_tflops(device: torch.device, dtype: str, seconds: float) -> float:
    side = GEMM_SIDE[device.type]
    if dtype in QUANTIZED and device.type == "cuda":
        return _eight_bit_tflops(device, side, seconds)
    torch_dtype, tf32 = PRECISIONS[dtype]
    a, b = (torch.randn(side, side, device=device).to(torch_dtype) for _ in range(2))
    out = torch.empty_like(a)
    with fp32_scope(tf32=tf32):
        latency_ms = _median_ms(lambda: torch.mm(a, b, out=out), device, seconds)
    return 2 * side**3 / latency_ms * 1e-9


def _eight_bit_tflops(device: torch.device, side: int, seconds: float) -> float:
    """The library's fp8 product, whose peak int8 shares; int8 itself on cards without fp8."""
    if torch.cuda.get_device_capability(device) >= (8, 9):
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)

        def call() -> object:
            return torch._scaled_mm(
                a, b.t(), one, one, out_dtype=torch.float16, use_fast_accum=True
            )

    else:
        x, y = (torch.randint(-9, 9, (side, side), device=device).to(torch.int8) for _ in range(2))

        def call() -> object:
            return torch._int_mm(x, y.t())

    return 2 * side**3 / _median_ms(call, device, seconds) * 1e-9


def _median_ms(call: object, device: torch.device, seconds: float) -> float:
    candidate = Candidate("ceiling", call)  # type: ignore[arg-type]
    result = measure([candidate], make_clock(device), seconds=seconds)["ceiling"]
    if not isinstance(result, Timing):
        raise RuntimeError(f"the device's ceilings could not be measured: {result.message}")
    return result.median_ms

"""fp8 layers by the CUDA library, which has one step a tensor where the scheme has one a channel.

    y = q_x @ q_w.T * (input step x weight step) + bias             wide, onto the stream or not
    y = gelu(...) / step of fc2's input                             fc1, stored in fp8
    y = q_x @ (q_w / part step).T ... + bias / part step            qkv, stored with q, k, v's steps

e4m3 has three bits of mantissa at every magnitude, so a common step costs nothing (0.1 dB of 20.8
on Swin-T) while all channels stay within its normal numbers: a weight whose largest row is more
than :data:`MAX_SPREAD` times its smallest stays with our kernel. Only the mix "auto" goes here,
since the weights are other roundings than the integer reference's, no worse ones.
"""

from __future__ import annotations

import dataclasses

import torch

from fastswin.ops.library_linear import library_linear_blocker
from fastswin.quant.convert import quantize_
from fastswin.quant.layers import QuantLayer
from fastswin.quant.ranges import LayerRange
from fastswin.quant.scheme import LARGEST

FP8 = torch.float8_e4m3fn

#: Largest ratio of two rows' magnitudes: the smallest row then has its 448 : 1 in normal numbers.
MAX_SPREAD = 64.0

#: Narrowest stage whose layers of a kind the library multiplies faster than our kernel, which
#: stores 8 bits and adds a residual at no cost (batch 32; H100, one product at a time): fc2 of 256
#: channels 15.2 us, of 768 24.2 against 33.4; half blocks on an H200 with proj by the library and
#: by us: 142 and 134 us at 192 channels, 80.0 and 80.0 at 384, 56.1 and 55.3 at 768, 39.5 and 41.8
#: at 1,536; merging 22.3 against 26.3 at 384.
LIBRARY_CHANNELS = {"qkv": 1024, "proj": 1024, "fc1": 1024, "fc2": 256, "reduction": 384}

#: The same for stages of fewer rows than :data:`FEW_ROWS`: fc1 of 1,568 rows and 768 channels 11.4
#: us against 13.1, of 6,272 rows 36.2 against 34.4.
LIBRARY_CHANNELS_FEW_ROWS = {"qkv": 768, "fc1": 768}
FEW_ROWS = 4096

#: Narrow stages with this many rows whose proj the library multiplies faster: 100,352 rows of 128
#: channels 15.2 us, in fp16 28.6.
NARROW_PROJ = {128: 50_000}

#: Fewest rows that the library's tiles are made for.
LIBRARY_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class LibraryAffine:
    """A linear layer's operands for the library; on the host until they are placed.

    Attributes:
        weight: ``[N, K]`` float8_e4m3fn, one step for all.
        scale: fp32 ``[1]``: input step x weight step.
        bias: fp32 ``[N]`` or None, divided like the weight's rows.
        output_inverse: fp32 ``[1]`` for qkv, whose steps are in its weight; None elsewhere.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    output_inverse: torch.Tensor | None


@torch.no_grad()
def library_affine(layer: QuantLayer, r: LayerRange) -> LibraryAffine | None:
    """A layer's operands, None where its scheme or its weight has no such form."""
    if r.scheme.format != "fp8" or r.scheme.activation != "per_tensor":
        return None
    if r.scheme.output == "quantized" and layer.attention is None:
        return None  # stored and read back at once: no form has that
    weight, bias = layer.folded(torch.float64)
    weight, bias = weight.float(), None if bias is None else bias.float()
    inverse = None
    if layer.attention is not None and r.scheme.output == "quantized":
        steps = torch.tensor(r.output_scale, device=weight.device)
        steps = steps.repeat_interleave(len(weight) // 3)
        weight = weight / steps[:, None]
        bias = None if bias is None else (bias / steps).cpu()
        inverse = torch.ones(1)
    rows = weight.abs().amax(dim=1)
    rows = rows[rows > 0]
    if not len(rows) or float(rows.max() / rows.min()) > MAX_SPREAD:
        return None
    step = rows.max() / LARGEST["fp8"]
    stored = quantize_(weight / step, "fp8").to(FP8)
    scale = (step * r.input_scale).reshape(1)
    return LibraryAffine(stored.cpu(), scale.cpu(), None if bias is None else bias.cpu(), inverse)


def why_not_library(
    kind: str, rows: int, channels: int, N: int, K: int, device: torch.device, wide: torch.dtype
) -> str | None:
    """None where the library is to multiply a layer, else why not."""
    narrowest = LIBRARY_CHANNELS[kind]
    if rows < FEW_ROWS:
        narrowest = LIBRARY_CHANNELS_FEW_ROWS.get(kind, narrowest)
    many = kind == "proj" and rows >= NARROW_PROJ.get(channels, rows + 1)
    if channels < narrowest and not many:
        return f"our kernel is faster at {channels} channels"
    if rows < LIBRARY_ROWS:
        return f"our kernel is faster at {rows} rows"
    narrow = kind in ("qkv", "fc1")
    return library_linear_blocker(device, FP8, FP8 if narrow else wide, N=N, K=K)

"""Calibrated tiny models and layer-by-layer comparisons that tests of quantised engines share."""

from __future__ import annotations

import dataclasses

import torch
from engine_cases import images_like, tiny

from fastswin import quant
from fastswin.engine import Engine
from fastswin.engine.calls import Call
from fastswin.models import SwinTransformer
from fastswin.ops.quantize.reference import LARGEST
from fastswin.ops.quantized_linear.ordering import restore_rows
from fastswin.quant.observations import Observations
from fastswin.testing.steps import beyond_one_step, within_one_step
from fastswin.testing.tensor_cores import fp8_product
from fastswin.testing.tolerance import assert_close_to_oracle

#: 24 channels, one head a block's width of 24, 15 classes: no dimension is a multiple of 16.
AWKWARD = {"embed_dim": 24, "num_heads": (1, 2), "num_classes": 15}

PER_TOKEN = quant.Scheme(
    "per_token",
    qkv=quant.LayerScheme(activation="per_token", output="quantized"),
    fc1=quant.LayerScheme(activation="per_token"),
    reduction=quant.LayerScheme(activation="per_token"),
)

#: fc1 in another format than fc2, and attention's output likewise.
MIXED = quant.Scheme(
    "mixed",
    qkv=quant.LayerScheme(output="quantized"),
    proj=quant.WIDE,
    fc1=quant.LayerScheme(),
    fc2=quant.WIDE,
)

#: Operators that write what a product reads.
NORMS = ("layer_norm", "gather_neighbours")

SCHEMES = {**quant.PRESETS, "per_token": PER_TOKEN, "mixed": MIXED}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, what it was seen to need, images, and its fp32 logits."""

    model: SwinTransformer
    seen: Observations
    images: torch.Tensor
    exact: torch.Tensor

    def calibration(self, scheme: str | quant.Scheme) -> quant.Calibration:
        return quant.calibration_of(self.model, self.seen, scheme)


def make_case(version: int = 1, **settings) -> Case:
    model = tiny(version, **{**AWKWARD, "depths": (2, 1), **settings})
    images = images_like(model, 3)
    with torch.no_grad():
        exact = model(images)
    return Case(model, quant.observe(model, images_like(model, 8).flip(0)), images, exact)


def reference_engine(case_or_model, precision: str = "int8", **arguments) -> Engine:
    """On PyTorch's reference operators, everything else in fp32."""
    model = getattr(case_or_model, "model", case_or_model)
    return Engine(model, precision, device="cpu", impl="reference", **arguments)


def precision_for(scheme: quant.Scheme) -> str:
    return scheme.name if scheme.name in quant.PRESETS else "int8"


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).square().mean()
    return (difference / expected.double().square().mean()).sqrt().item()


def check_layers(
    engine: Engine, reference: quant.QuantizedSwin, images: torch.Tensor
) -> dict[str, float]:
    """Every 8-bit call of an engine against the integer reference on the same inputs.

    Weights must be the reference's integers; results may differ by one step of an 8-bit output, or
    by two roundings of a wide one; in fp8 on a GPU by twice what tensor cores and one rounding lose
    (testing/tensor_cores.py). Blocks that repeat a call are represented by one.

    Returns:
        Kinds of calls that were compared, and how far beyond one step the worst of them is, over
        the RMS of the results (testing/steps.py).
    """
    compared: dict[str, float] = {}
    for call in engine.calls(images):
        name = call.function.__name__.strip("_")
        if name == "quantized_linear":
            far = _check_linear(call, reference)
            compared[call.layer] = max(far, compared.get(call.layer, 0.0))
        elif (
            name in ("layer_norm", "gather_neighbours")
            and call.kwargs.get("output_scale") is not None
        ):
            repeated = call.run()
            expected = call.function(*call.args, **{**call.kwargs, "impl": "reference"})
            assert within_one_step(repeated, expected)
            compared.setdefault(name, 0.0)
    return compared


def _check_linear(call: Call, reference: quant.QuantizedSwin) -> float:
    x, weight, scale, bias = call.args
    if call.kwargs["ordered"]:
        weight, scale = restore_rows(weight), restore_rows(scale)
        bias = None if bias is None else restore_rows(bias)
    same = [
        linear
        for linear in reference.linears.values()
        if linear.weight.shape == weight.shape
        and linear.weight.dtype == weight.dtype
        and torch.equal(linear.weight.view(torch.int8), weight.cpu().view(torch.int8))
    ]
    assert len(same) == 1, f"stage {call.stage} {call.layer}: not the reference's integers"
    row_scale, output_scale = call.kwargs["row_scale"], call.kwargs["output_scale"]

    def behind(product: torch.Tensor) -> torch.Tensor:
        y = product * scale.cpu()
        if row_scale is not None:
            y *= row_scale.cpu()[..., None]
        y = y if bias is None else y + bias.cpu()
        return torch.nn.functional.gelu(y) if call.kwargs.get("activation") == "gelu" else y

    y = behind(same[0].product(x.cpu().float()))
    own = {**call.kwargs, "residual": None, "out": None}  # the stream has changed since
    actual = call.function(*call.args, **own).cpu()
    if output_scale is None and x.dtype == torch.float8_e4m3fn and x.is_cuda:
        rows = x.reshape(-1, x.shape[-1])
        eager = behind(fp8_product(rows, weight).view(*x.shape[:-1], -1).cpu())
        assert_close_to_oracle(actual, eager.to(actual.dtype), y, actual.dtype)
        return 0.0
    if output_scale is None:
        bound = 2 * torch.finfo(torch.float16).eps * y.abs().max() + 1e-4
        if actual.dtype == torch.bfloat16:
            bound *= 8
        assert (actual.float() - y).abs().max() <= bound
        return 0.0
    steps = output_scale.cpu().repeat_interleave(y.shape[-1] // len(output_scale))
    largest = LARGEST[actual.dtype]
    scaled = (y / steps).clamp(-largest, largest)
    expected = (scaled.round() if actual.dtype == torch.int8 else scaled).to(actual.dtype)
    far = beyond_one_step(actual, expected)
    assert within_one_step(actual, expected), f"{call.layer}: off by {far:.1e} of the RMS"
    return far

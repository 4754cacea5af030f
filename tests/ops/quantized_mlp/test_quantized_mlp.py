"""The fused 8-bit MLP against its reference, which is the chain of the single operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.ops.quantized_linear.ordering import order_rows
from fastswin.ops.quantized_mlp.config import QuantizedMlpConfig, quantized_mlp_blocker

FORMATS = {"int8": torch.int8}
if torch.cuda.is_available():
    FORMATS["fp8"] = torch.float8_e4m3fn

CONFIGS = {
    "pointers": QuantizedMlpConfig(32, 64, 4, 2),
    "tma": QuantizedMlpConfig(32, 128, 4, 2, tma=True),
}


def made(randn, M: int, C: int, format: str) -> dict:
    dtype = FORMATS[format]
    fc1, rows1 = ops.quantize_per_token(randn(4 * C, C) * C**-0.5, dtype)
    fc2, rows2 = ops.quantize_per_token(randn(C, 4 * C) * (4 * C) ** -0.5, dtype)
    large = 127 if format == "int8" else 448
    step = torch.full((1,), 4.5 / large, device=fc1.device)
    return {
        "x": randn(M, C, dtype=torch.float16), "fc1_weight": fc1, "fc1_scale": rows1 * step,
        "fc1_bias": randn(4 * C) * 0.2, "fc2_weight": fc2, "fc2_scale": rows2 * step,
        "fc2_bias": randn(C) * 0.2, "input_scale": step, "hidden_scale": step,
    }  # fmt: skip


def assert_near_reference(given: dict, found: torch.Tensor) -> None:
    """What a rounding at a half moves is small beside what rounding to 8 bits moves.

    Kernel and reference round the same numbers, up to fp32's and GELU's last digits, so that few
    values land one step apart. Both are compared with the MLP whose activations stay wide.
    """
    stream = given["x"].float() + given.get("offset", torch.zeros(1).to(given["x"])).float()
    h = F.layer_norm(stream, stream.shape[-1:])
    for layer, step in (("fc1", "input_scale"), ("fc2", "hidden_scale")):
        weight = given[f"{layer}_weight"].float() * (given[f"{layer}_scale"] / given[step])[:, None]
        h = F.linear(h, weight, given[f"{layer}_bias"])
        h = F.gelu(h) if layer == "fc1" else h
    wanted = ops.quantized_mlp(**given, impl="reference").float()
    rounding = (wanted - (stream + h)).abs()
    error = (found.float() - wanted).abs()
    half = torch.finfo(torch.float16).eps * wanted.abs().max()
    assert error.max() <= 0.5 * rounding.max() + half
    assert error.square().mean() <= (0.1 * rounding.square().mean().sqrt() + half) ** 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("channels", [32, 96])
def test_quantized_mlp(channels, config, format, randn):
    given = made(randn, 37, channels, format)
    if config == "tma":
        given["offset"] = randn(channels)
    found = ops.quantized_mlp(**given, impl="triton", config=CONFIGS[config])
    again = ops.quantized_mlp(**given, impl="triton", config=CONFIGS[config])
    assert torch.equal(found, again)
    assert_near_reference(given, found)


def test_reference_is_the_chain_of_operators(randn):
    given = made(randn, 9, 64, "int8")
    h = ops.layer_norm(given["x"], output_scale=given["input_scale"], impl="reference")
    h = ops.quantized_linear(
        h, given["fc1_weight"], given["fc1_scale"], given["fc1_bias"], activation="gelu",
        output_scale=given["hidden_scale"], impl="reference",
    )  # fmt: skip
    wanted = ops.quantized_linear(
        h, given["fc2_weight"], given["fc2_scale"], given["fc2_bias"], residual=given["x"],
        impl="reference",
    )  # fmt: skip
    assert torch.equal(ops.quantized_mlp(**given, impl="reference"), wanted)


def test_in_place(randn):
    given = made(randn, 20, 32, "int8")
    wanted = ops.quantized_mlp(**given, impl="triton")
    x = given["x"]
    assert ops.quantized_mlp(**given, out=x, impl="triton") is x
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_layer_in_the_kernels_order(impl, randn):
    given = made(randn, 20, 32, "int8")
    wanted = ops.quantized_mlp(**given, impl=impl)
    for name in ("fc1_weight", "fc1_scale", "fc1_bias"):
        given[name] = order_rows(given[name])
    assert torch.equal(ops.quantized_mlp(**given, ordered=True, impl=impl), wanted)
    assert not torch.equal(ops.quantized_mlp(**given, impl=impl), wanted)


def test_blockers_are_named(randn):
    assert quantized_mlp_blocker(192, 768) is None
    assert "256 channels exceed 192" in quantized_mlp_blocker(256, 1024)
    assert "powers of two of at least 32" in quantized_mlp_blocker(80, 384)
    assert "not a multiple of 128" in quantized_mlp_blocker(96, 200)
    with pytest.raises(RuntimeError, match="24 channels are not one or two"):
        ops.quantized_mlp(**made(randn, 4, 24, "int8"), impl="triton")


@pytest.mark.parametrize(
    ("name", "match"),
    [("fc1_scale", "fc1_scale must be"), ("fc2_bias", "fc2_bias must be"),
     ("hidden_scale", "hidden_scale must be float32"), ("x", "fc1_weight must be")],
)  # fmt: skip
def test_refusals_name_the_argument(name, match, randn):
    given = made(randn, 4, 32, "int8")
    given[name] = given[name][..., :-1] if name != "hidden_scale" else given[name].half()
    with pytest.raises(ValueError, match=match):
        ops.quantized_mlp(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(100352, 96), (100352, 128), (25088, 192)], ids=str)
def test_shipped_launches(shape, format, randn):
    given = made(randn, *shape, format)
    found = ops.quantized_mlp(**given, impl="triton")
    for _ in range(2):
        assert torch.equal(found, ops.quantized_mlp(**given, impl="triton"))
    assert_near_reference(given, found)

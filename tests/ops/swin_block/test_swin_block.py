"""The operator without a card: arguments, refusals, and its reference against the model's block."""

from __future__ import annotations

import pytest
import torch
from swin_block_cases import in_double, make_block

from fastswin.models.config import SwinConfig
from fastswin.models.swin import SwinTransformerBlock
from fastswin.ops.swin_block import api, swin_block
from fastswin.ops.window_attention.geometry import expand_bias_table

#: Arguments of a wrong shape, each named by its message.
MISSHAPEN = {
    "qkv_weight": (192, 63), "qkv_bias": (64,), "proj_weight": (64, 63), "proj_bias": (63,),
    "fc1_weight": (256, 63), "fc1_bias": (64,), "fc2_weight": (64, 128), "fc2_bias": (63,),
    "bias": (2, 49, 48), "pad_qkv": (64,), "norm1_weight": (63,), "norm1_bias": (63,),
    "norm2_weight": (63,), "norm2_bias": (63,), "out": (1, 7, 14, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_wrong_shape_is_named(name):
    given = make_block(version=2) | {name: torch.zeros(MISSHAPEN[name])}
    with pytest.raises(ValueError, match=f"^{name} must be "):
        swin_block(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(14, 7, 64)}, "x must be .* got \\(14, 7, 64\\)"),
        ({"num_heads": 3}, "x must be .* multiple of num_heads=3"),
        ({"num_heads": 0}, "x must be .* num_heads=0"),
        ({"window_size": (0, 7)}, "window_size must be two positive integers"),
        ({"window_size": (7,)}, "window_size must be two positive integers"),
        ({"shift_size": (3,)}, "shift_size must satisfy"),
        ({"shift_size": (7, 0)}, "shift_size must satisfy"),
        ({"shift_size": (0, -1)}, "shift_size must satisfy"),
        ({"norm2_bias": None}, "norm2_weight and norm2_bias or none"),
        ({"norm1_weight": None, "norm1_bias": None}, "give norm1_weight, norm1_bias"),
        ({"scale": 0.2}, "scale \\(V1\\) or logit_scale \\(V2\\), not both"),
        ({"logit_scale": torch.zeros(3)}, "logit_scale must hold 2 numbers, got 3"),
        ({"impl": "cuda"}, "impl must be one of"),
    ],
)
def test_a_wrong_argument_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        swin_block(**make_block(version=2) | changed)


@pytest.mark.parametrize("version", [1, 2])
def test_an_explicit_kernel_says_why_it_cannot_run(version):
    with pytest.raises(RuntimeError, match=r"swin_block: .*(need a GPU|on the CPU)"):
        swin_block(**make_block(version=version), impl="triton")


@pytest.mark.parametrize(
    ("made", "changed", "message"),
    [
        ({"dtype": torch.float32}, {}, "float32 products are faster"),
        ({}, {"qkv_weight": torch.zeros(192, 64).half().requires_grad_()}, "a gradient is needed"),
        ({}, {"norm1_weight": torch.zeros(64, requires_grad=True)}, "a gradient is needed"),
        ({"window": (6, 8)}, {}, "windows of 49 to 64 tokens are needed, not 48"),
        ({}, {"logit_scale": None}, "norms behind \\(V2\\) need logit_scale"),
        ({"version": 1}, {"logit_scale": torch.zeros(2)}, "norms in front \\(V1\\) take none"),
        ({}, {"out": torch.zeros(1, 7, 14, 64).half().transpose(1, 2)}, "out is not contiguous"),
        ({}, {"fc2_weight": torch.zeros(64, 256)}, "weights are torch.float32, x is torch.float16"),
    ],
)
def test_a_card_would_refuse_by_name(made, changed, message, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # tensors on a CPU are no reason
    monkeypatch.setattr(api, "why_no_clusters", lambda device_type, capability: None)
    made = make_block(**{"version": 2} | made) | changed
    with pytest.raises(RuntimeError, match=message):
        swin_block(**made, impl="triton")
    assert swin_block(**make_block()).isfinite().all()  # "auto" goes on


def model_block(version, shifted):
    """A block of the readable model in fp64 with nothing at its initial value, and its operator's
    arguments."""
    config = SwinConfig(version=version, embed_dim=64, depths=(2,), num_heads=(2,))
    torch.manual_seed(version)
    block = SwinTransformerBlock(config, 0, int(shifted), 0.0).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    attn, mlp = block.attn, block.mlp
    layers = {"qkv": attn.qkv, "proj": attn.proj, "fc1": mlp.fc1, "fc2": mlp.fc2}
    given = {f"{name}_weight": layer.weight for name, layer in layers.items()}
    given |= {f"{name}_bias": layer.bias for name, layer in layers.items()}
    given["qkv_bias"] = attn.qkv_bias
    for name, norm in (("norm1", block.norm1), ("norm2", block.norm2)):
        if version == 2:
            given |= {f"{name}_weight": norm.weight, f"{name}_bias": norm.bias}
            continue
        layer = {"norm1": "qkv", "norm2": "fc1"}[name]
        weight = given[f"{layer}_weight"]
        given[f"{layer}_bias"] = given[f"{layer}_bias"] + weight @ norm.bias
        given[f"{layer}_weight"] = weight * norm.weight
    found = attn.position_bias()
    given["bias"] = expand_bias_table(found["bias_table"], (7, 7))
    if version == 2:
        given["logit_scale"] = found["logit_scale"]
    return block, given | {"num_heads": 2, "window_size": (7, 7)}


@pytest.mark.parametrize("shift", [(0, 0), (3, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("version", [1, 2])
@torch.no_grad()
def test_reference_is_the_readable_models_block(version, shift):
    block, given = model_block(version, shift != (0, 0))
    x = torch.randn(2, 21, 14, 64, dtype=torch.float64) + 1
    expected = block(x, shift)
    actual = swin_block(x, **given, shift_size=shift, impl="reference")
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("version", [1, 2])
def test_auto_is_the_reference_on_a_cpu(version, dtype):
    made = make_block(version=version, dtype=dtype)
    if dtype == torch.float64:
        made = in_double(made)
    expected = swin_block(**made, impl="reference")
    assert expected.dtype == dtype
    assert torch.equal(swin_block(**made), expected)
    out = torch.full_like(expected, float("nan"))
    assert swin_block(**made, out=out) is out
    assert torch.equal(out, expected)
    x = made["x"]
    assert swin_block(**made, out=x) is x
    assert torch.equal(x, expected)


def test_layers_without_biases_are_those_with_zeros():
    made = make_block()
    names = [f"{layer}_bias" for layer in ("qkv", "proj", "fc1", "fc2")]
    none = {name: None for name in (*names, "bias")}
    zeros = {name: torch.zeros_like(made[name]) for name in (*names, "bias")}
    assert torch.equal(swin_block(**made | none), swin_block(**made | zeros))


def test_no_images_give_no_images():
    made = make_block()
    made["x"] = made["x"][:0]
    assert swin_block(**made).shape == (0, 14, 7, 64)

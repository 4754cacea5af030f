"""Window attention on 8-bit q, k, v and with an 8-bit output, against the fp32 reference.

Maps are not square, windows and images hold different numbers, head_dim 8 and 16 lie below the 32
that 8-bit products take. fp8 runs on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.testing.steps import steps_apart

GPU = torch.cuda.is_available()
FORMATS = {"int8": torch.int8} | ({"fp8": torch.float8_e4m3fn} if GPU else {})

#: Share of outputs that may be a step off: probabilities are rounded to fp16 before the product.
STEPS_OFF = {"int8": 0.02, "fp8": 0.05}

CASES = {
    # name: (batch, map, heads, head_dim, window, shift, cosine)
    "shifted": (2, (4, 8), 1, 16, (4, 4), (2, 2), False),
    "padded": (1, (4, 6), 2, 8, (4, 4), (2, 1), False),
    "two-key-tiles": (1, (9, 9), 1, 32, (9, 9), (0, 0), False),
    "online": (1, (16, 17), 1, 16, (16, 17), (0, 0), False),
    "cosine": (1, (4, 8), 2, 16, (4, 4), (2, 2), True),
    "cosine-padded": (1, (4, 6), 1, 16, (4, 4), (2, 1), True),
}


def arguments(case: str, randn, qkv_format: str | None, output_format: str | None) -> dict:
    B, (H, W), heads, head_dim, window, shift, cosine = CASES[case]
    channels, tokens = 3 * heads * head_dim, window[0] * window[1]
    made = {
        "num_heads": heads, "window_size": window, "shift_size": shift,
        "bias": randn(heads, tokens, tokens) * 0.5,
    }  # fmt: skip
    qkv, pad = randn(B, H, W, channels), randn(channels)
    if cosine:
        made["logit_scale"] = randn(heads) * 0.3 + 2
    made["qkv"], made["qkv_bias"] = qkv.half(), pad
    if qkv_format:
        large = 1.0 if qkv_format == "int8" else 20.0
        step = torch.tensor([0.03, 0.02, 0.04], device=qkv.device) / large
        made["qkv_scale"] = step
        made["qkv"] = ops.quantize(qkv, step, FORMATS[qkv_format], impl="reference")
        made["qkv_bias"] = ops.quantize(pad, step, FORMATS[qkv_format], impl="reference")
    if output_format:
        made["output_scale"] = torch.full((1,), 0.02, device=qkv.device)
        made["out_dtype"] = FORMATS[output_format]
    return made


def check(made: dict, format: str) -> torch.Tensor:
    found = ops.quantized_window_attention(**made, impl="triton")
    again = ops.quantized_window_attention(**made, impl="triton")
    wanted = ops.quantized_window_attention(**made, impl="reference")
    assert torch.equal(found.view(torch.uint8), again.view(torch.uint8))
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if "output_scale" in made:
        off = steps_apart(found, wanted)
        assert int(off.max()) <= 1
        assert (off > 0).float().mean().item() <= STEPS_OFF[format]
    else:
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_narrow_in_and_out(case, format, randn):
    check(arguments(case, randn, format, format), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", ["padded", "cosine", "online"])
def test_narrow_in_wide_out(case, format, randn):
    assert check(arguments(case, randn, format, None), format).dtype == torch.float16


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", ["padded", "cosine"])
def test_wide_in_narrow_out(case, format, randn):
    assert check(arguments(case, randn, None, format), format).dtype == FORMATS[format]


@pytest.mark.parametrize("format", FORMATS)
def test_a_wide_pad_is_stored_first(format, randn):
    """qkv of padded tokens may come unquantised: the same answer as with the stored one."""
    made = arguments("padded", randn, format, format)
    stored = check(made, format)
    steps = made["qkv_scale"].repeat_interleave(made["qkv"].shape[-1] // 3)
    made["qkv_bias"] = made["qkv_bias"].float() * steps
    found = ops.quantized_window_attention(**made, impl="triton")
    assert torch.equal(found.view(torch.uint8), stored.view(torch.uint8))


def test_without_a_pad_padding_is_zero(randn):
    made = arguments("padded", randn, "int8", "int8") | {"qkv_bias": None}
    zeros = made | {"qkv_bias": torch.zeros_like(made["qkv"][0, 0, 0])}
    wanted = ops.quantized_window_attention(**zeros, impl="reference")
    assert torch.equal(ops.quantized_window_attention(**made, impl="reference"), wanted)
    assert (check(made, "int8").int() - wanted.int()).abs().max() <= 1


def test_nan_stays_in_its_window_and_becomes_zero(randn):
    made = arguments("shifted", randn, None, "int8")
    clean = ops.quantized_window_attention(**made, impl="triton")
    made["qkv"][0, 1, 3, :] = float("nan")  # the first window of the shifted map: columns 2 to 5
    found = ops.quantized_window_attention(**made, impl="triton")
    assert not found[0, :, 2:6].any()
    differs = (found != clean).any(-1)
    assert differs[0, :, 2:6].any()
    differs[0, :, 2:6] = False
    assert not differs.any()


def test_registered_operator(randn):
    from fastswin.ops.window_attention.packing import pack_bias
    from fastswin.ops.window_attention.register import quantized_window_attention_fwd

    made = arguments("shifted", randn, "int8", "int8")
    heads, window, shift = made["num_heads"], made["window_size"], made["shift_size"]
    packed = (
        made["qkv"], pack_bias(made["bias"], heads, window, shift, made["qkv"].device), None,
        made["qkv_bias"], made["qkv_scale"], made["output_scale"], 16**-0.5, heads, window, shift,
        False, torch.int8,
    )  # fmt: skip
    wanted = ops.quantized_window_attention(**made, impl="triton")
    assert torch.equal(quantized_window_attention_fwd(*packed), wanted)
    torch.library.opcheck(
        quantized_window_attention_fwd.default,
        packed,
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"qkv_scale": None}, "qkv_scale must be given for an 8-bit qkv"),
        ({"qkv_scale": torch.ones(1)}, r"qkv_scale must be float32 \[3\]"),
        ({"output_scale": torch.ones(3)}, r"output_scale must be float32 \[1\]"),
        ({"output_scale": None}, "out_dtype torch.int8 needs output_scale"),
        ({"num_heads": 5}, "multiple of num_heads=5"),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_refusals_name_the_argument(change, match, randn, device):
    made = arguments("shifted", randn, "int8", "int8")
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=match):
        ops.quantized_window_attention(**made | change)

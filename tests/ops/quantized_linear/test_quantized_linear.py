"""8-bit linear layers: exact integer products, epilogues to one step, awkward sizes, refusals.

On a CPU the kernels run in the interpreter, int8 only; fp8 joins on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.models import create_model
from fastswin.ops.quantized_linear import forward
from fastswin.ops.quantized_linear.config import (
    MAX_K,
    QuantizedGemmConfig,
    default_quantized_gemm_config,
    quantized_linear_blocker,
)
from fastswin.ops.quantized_linear.ordering import order_rows, restore_rows
from fastswin.ops.quantized_linear.reference import product_ref
from fastswin.quant import calibrate
from fastswin.quant.convert import integer_product, quantize_linear
from fastswin.quant.layers import quant_layers
from fastswin.testing.steps import beyond_one_step, steps_apart, within_one_step

GPU = torch.cuda.is_available()
FORMATS = {"int8": torch.int8} | ({"fp8": torch.float8_e4m3fn} if GPU else {})

CONFIGS = {
    "pointers": QuantizedGemmConfig(64, 64, 64, 4, 3),
    "tma": QuantizedGemmConfig(64, 64, 64, 4, 3, tma=True),
    "persistent": QuantizedGemmConfig(64, 64, 64, 4, 3, tma=True, persistent=1),
    "persistent-store": QuantizedGemmConfig(
        64, 64, 64, 4, 3, tma=True, persistent=1, tma_store=True
    ),
}

#: Share of results that may be a step off: GELU's formula and fp32 roundings at a half; on fp8,
#: the tensor cores' fast accumulation (1e-3 to 2e-3) beside a step of 6e-2.
STEPS_OFF = {"int8": 0.01, "fp8": 0.2}


def assert_right(found: torch.Tensor, wanted: torch.Tensor, format: str) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    if found.dtype in FORMATS.values():
        off = steps_apart(found, wanted)
        far = beyond_one_step(found, wanted)
        assert within_one_step(found, wanted), f"off by {far:.1e} of the RMS"
        assert (off > 0).float().mean().item() <= STEPS_OFF[format]
    elif format == "int8":  # one rounding of the result, GELU to half of another
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, wanted, rtol=eps, atol=1e-4)
    else:
        rounding = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, wanted, rtol=4e-3 + rounding, atol=8e-3)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def operands(randn, M: int, N: int, K: int, format: str = "int8") -> dict:
    """Rows and channels that differ; int8 uses its whole range."""
    dtype = FORMATS[format]

    def numbers(*shape):
        x = randn(*shape) * (45.0 if format == "int8" else 1.0)
        return x.clamp(-127, 127).round().to(dtype) if format == "int8" else x.to(dtype)

    unit = 1 / (45.0**2 if format == "int8" else 1.0) / K**0.5
    return {
        "x": numbers(M, K), "weight": numbers(N, K), "scale": unit * (1 + randn(N).abs()),
        "bias": randn(N) * 0.5,
    }  # fmt: skip


def check(made: dict, format: str, **more) -> torch.Tensor:
    """Against the reference, and bitwise in two runs (three where that is quick)."""
    found = ops.quantized_linear(**made, **more, impl="triton")
    for _ in range(2 if GPU else 1):
        assert same_bits(found, ops.quantized_linear(**made, **more, impl="triton"))
    assert_right(found, ops.quantized_linear(**made, impl="reference"), format)
    return found


def with_epilogue(made: dict, epilogue: str, randn) -> dict:
    M, N = len(made["x"]), len(made["weight"])
    step = torch.tensor([0.02, 0.03, 0.05], device=made["x"].device)
    return (
        made
        | {
            "wide": {},
            "bf16": {"out_dtype": torch.bfloat16},
            "fp32": {"out_dtype": torch.float32},
            "no-bias": {"bias": None},
            "gelu": {"activation": "gelu"},
            "residual": {"residual": randn(M, N).half()},
            "gelu-residual": {"activation": "gelu", "residual": randn(M, N).half()},
            "tokens": {"row_scale": randn(M).abs() + 0.5},
            "qkv": {"output_scale": step},
            "gelu-stored": {"activation": "gelu", "output_scale": step[:1]},
            "tokens-stored": {"row_scale": randn(M).abs() + 0.5, "output_scale": step},
        }[epilogue]
    )


EPILOGUES = (
    "wide", "bf16", "fp32", "no-bias", "gelu", "residual", "gelu-residual", "tokens", "qkv",
    "gelu-stored", "tokens-stored",
)  # fmt: skip


#: Pointers take every epilogue, the copy engine those that differ in what it loads or stores.
CASES = [("pointers", e) for e in EPILOGUES]
CASES += [("persistent-store", e) for e in ("qkv", "gelu-stored", "tokens-stored", "residual")]
CASES += [("tma", "qkv"), ("persistent", "wide")]


@pytest.fixture
def one_multiprocessor(monkeypatch):
    """Persistent programs walk: there are fewer of them than tiles."""
    monkeypatch.setattr(forward, "multiprocessor_count", lambda device: 1)


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("config", "epilogue"), CASES)
def test_epilogues(config, epilogue, format, randn):
    made = with_epilogue(operands(randn, 40, 144, 96, format), epilogue, randn)
    check(made, format, config=CONFIGS[config])


@pytest.mark.usefixtures("one_multiprocessor")
@pytest.mark.parametrize("config", ["pointers", "persistent-store"])
@pytest.mark.parametrize("epilogue", ["qkv", "gelu-stored", "tokens-stored"])
def test_layers_in_the_kernels_order(config, epilogue, randn):
    """The same bits as from the natural order, which the reference restores as well."""
    made = with_epilogue(operands(randn, 40, 96, 64), epilogue, randn)
    wanted = ops.quantized_linear(**made, impl="triton", config=CONFIGS[config])
    for name in ("weight", "scale", "bias"):
        made[name] = order_rows(made[name])
    found = ops.quantized_linear(**made, ordered=True, impl="triton", config=CONFIGS[config])
    assert same_bits(found, wanted)
    reference = ops.quantized_linear(**made, ordered=True, impl="reference")
    assert steps_apart(found, reference).max() <= 1
    assert not same_bits(found, ops.quantized_linear(**made, impl="triton"))


def test_the_order_is_refused_where_there_is_none(randn):
    made = operands(randn, 4, 32, 32)
    with pytest.raises(ValueError, match="ordered must be False without output_scale"):
        ops.quantized_linear(**made, ordered=True)
    made = operands(randn, 4, 72, 32) | {"output_scale": torch.ones(3).to(made["scale"])}
    with pytest.raises(ValueError, match=r"72 channels in 3 part\(s\) are no multiple of 16"):
        ops.quantized_linear(**made, ordered=True)
    t = randn(32, 3)
    assert torch.equal(restore_rows(order_rows(t)), t)
    assert not torch.equal(order_rows(t), t)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("K", [96, 1600], ids="K{}".format)
def test_int8_sums_are_exact(K, config, device):
    """Every operand at an end of its range, so that sums are as long as they get."""
    generator = torch.Generator().manual_seed(K)
    signs = torch.randint(0, 2, (5 + 67, K), generator=generator) * 254 - 127
    x, weight = signs.to(torch.int8).to(device).split([5, 67])
    weight = torch.cat((weight, x))  # squares: the largest sums
    weight = torch.cat((weight, weight[:8]))
    sums = x.cpu().long() @ weight.cpu().long().t()
    assert int(sums.abs().max()) == K * 127 * 127
    found = ops.quantized_linear(
        x, weight, torch.ones(len(weight), device=device), out_dtype=torch.float32,
        impl="triton", config=CONFIGS[config],
    )  # fmt: skip
    assert torch.equal(found.cpu(), sums.float())  # the one rounding above 2**24
    assert torch.equal(product_ref(x, weight).cpu(), sums.float())


def test_reference_is_the_quant_packages(randn):
    made = operands(randn, 33, 40, 1500)
    x, weight = made["x"], made["weight"]
    assert torch.equal(product_ref(x, weight), integer_product(x.float(), weight.float()))


def test_a_calibrated_layer(device):
    """A real layer's operands: engine's operator and integer reference agree on every element."""
    torch.manual_seed(3)
    model = create_model(
        "swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(2, 4),
        window_size=4, image_size=32, num_classes=15,
    ).eval()  # fmt: skip
    calibration = calibrate(model, [torch.randn(4, 3, 32, 32)], "int8")
    name = "layers.0.blocks.0.mlp.fc1"
    r, layer = calibration.layers[name], quant_layers(model)[name]
    linear = quantize_linear(layer, r)
    h = torch.randn(50, 24)
    wanted = linear(h.clone())
    q = ops.quantize(h.to(device), torch.tensor([r.input_scale], device=device), torch.int8)
    found = ops.quantized_linear(
        q, linear.weight.to(device), (r.input_scale * linear.weight_scale).to(device),
        linear.bias.to(device), out_dtype=torch.float32, impl="triton",
    )  # fmt: skip
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [(1, 15, 24), (33, 15, 24), (7, 72, 100), (66, 80, 64), (1, 10, 768), (3, 1, 1)],
    ids="{0[0]}x{0[1]}x{0[2]}".format,
)
@pytest.mark.parametrize("epilogue", ["wide", "gelu-residual", "gelu-stored"])
def test_awkward_sizes(shape, epilogue, format, randn):
    """15 classes, 24 channels, one token: padded inside the kernel, never refused."""
    check(with_epilogue(operands(randn, *shape, format), epilogue, randn), format)


@pytest.mark.parametrize("format", FORMATS)
def test_residual_in_place(format, randn):
    made = operands(randn, 66, 48, 96, format)
    stream = randn(66, 48).half()
    wanted = ops.quantized_linear(**made, residual=stream, impl="reference")
    assert ops.quantized_linear(**made, residual=stream, out=stream, impl="triton") is stream
    assert_right(stream, wanted, format)


def test_leading_axes_and_strides(randn):
    """A map in image order, rows that are columns of another tensor, and an odd address."""
    made = operands(randn, 60, 48, 96)
    rows = randn(60).abs()
    flat = ops.quantized_linear(**made, row_scale=rows, impl="reference")
    x = made["x"].view(3, 4, 5, 96)
    mapped = made | {"x": x, "row_scale": rows.view(3, 4, 5, 1)}
    found = ops.quantized_linear(**mapped, impl="triton")
    assert found.shape == (3, 4, 5, 48)
    assert_right(found.view(60, 48), flat, "int8")
    turned = made | {"x": made["x"].t().contiguous().t(), "row_scale": rows}
    assert not turned["x"].is_contiguous()
    assert_right(ops.quantized_linear(**turned, impl="triton"), flat, "int8")
    shifted = torch.zeros(60 * 96 + 1, dtype=torch.int8, device=x.device)[1:].view(60, 96)
    shifted.copy_(made["x"])
    odd = made | {"x": shifted, "row_scale": rows}
    assert_right(ops.quantized_linear(**odd, impl="triton", config=CONFIGS["tma"]), flat, "int8")


def test_zero_channels_and_rows_stay_zero(randn):
    made = operands(randn, 20, 48, 96) | {"bias": None}
    made["x"][3] = 0
    made["weight"][5] = 0
    found = ops.quantized_linear(**made, output_scale=torch.ones(1).to(made["x"]).float(),
                                 impl="triton")  # fmt: skip
    assert not found[3].any()
    assert not found[:, 5].any()


def test_saturation_and_tokens_without_a_step(randn):
    made = operands(randn, 20, 48, 96)
    rows = torch.ones(20, device=made["x"].device)
    rows[2], rows[4] = float("nan"), float("inf")
    step = torch.full((1,), 1e-6, device=rows.device)
    for impl in ("triton", "reference"):
        found = ops.quantized_linear(**made, row_scale=rows, output_scale=step, impl=impl)
        assert not found[2].any()  # int8 holds no NaN
        assert (found[0].abs() >= 126).float().mean() > 0.9
    wide = ops.quantized_linear(**made, row_scale=rows, impl="triton")
    assert torch.isnan(wide[2]).all()


def test_empty(device):
    x = torch.zeros(0, 32, dtype=torch.int8, device=device)
    weight = torch.zeros(8, 32, dtype=torch.int8, device=device)
    scale = torch.ones(8, device=device)
    assert ops.quantized_linear(x, weight, scale, impl="triton").shape == (0, 8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.zeros(4, 32)}, "x must be torch.int8 or"),
        ({"weight": torch.zeros(8, 32, dtype=torch.float8_e4m3fn)}, "weight must be torch.int8"),
        ({"weight": torch.zeros(8, 16, dtype=torch.int8)}, "x must end in weight's 16"),
        ({"scale": torch.ones(4)}, r"scale must be float32 \[8\]"),
        ({"bias": torch.ones(8).half()}, r"bias must be float32 \[8\]"),
        ({"row_scale": torch.ones(3)}, "row_scale must be float32"),
        ({"activation": "relu"}, "activation must be None or 'gelu'"),
        ({"residual": torch.ones(4, 7).half()}, "residual must be torch.float16"),
        ({"residual": torch.ones(4, 8), "out_dtype": torch.half}, "residual must be torch.float16"),
        ({"out": torch.ones(8, 4).half().t()}, "out must be contiguous"),
        ({"out_dtype": torch.int8}, "out_dtype must be float16, bfloat16 or float32"),
        ({"output_scale": torch.ones(2)}, r"output_scale must be float32 \[1\] or \[3\]"),
        ({"output_scale": torch.ones(3)}, "3 parts, which do not divide 8"),
        ({"output_scale": torch.ones(1), "out_dtype": torch.half}, "out_dtype must be None or"),
        ({"output_scale": torch.ones(1), "residual": torch.ones(4, 8).half()}, "exclude each"),
        ({"config": (64, 64)}, "config must be a QuantizedGemmConfig"),
        (
            {"config": QuantizedGemmConfig(64, 64, 16, 4, 2)},
            "config: block_k must be a power of two of at least 32, got 16",
        ),
        (
            {"config": QuantizedGemmConfig(64, 48, 64, 4, 2)},
            "config: block_n must be a power of two of at least 16, got 48",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_refusals_name_the_argument(change, match):
    made = {
        "x": torch.zeros(4, 32, dtype=torch.int8), "weight": torch.zeros(8, 32, dtype=torch.int8),
        "scale": torch.ones(8),
    }  # fmt: skip
    with pytest.raises(ValueError, match=match):
        ops.quantized_linear(**made | change)


def test_configurations_that_the_copy_engine_cannot_serve(randn):
    made = operands(randn, 8, 15, 24)
    with pytest.raises(ValueError, match="tma needs rows of a multiple of 16 bytes"):
        ops.quantized_linear(**made, impl="triton", config=CONFIGS["tma"])
    made = operands(randn, 8, 15, 32) | {"output_scale": torch.ones(1).to(made["scale"])}
    with pytest.raises(ValueError, match="tma_store needs tma and N a multiple of 16"):
        ops.quantized_linear(**made, impl="triton", config=CONFIGS["persistent-store"])


def test_blockers_are_named():
    assert quantized_linear_blocker(15, 24) is None
    assert "int32 sums could overflow" in quantized_linear_blocker(8, MAX_K + 1)
    assert MAX_K * 127 * 127 < 2**31


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("M", [1, 49, 196, 1568, 25088, 100352])
def test_heuristic_fits_every_card(M, capability):
    """Operands of the whole pipeline within shared memory: 99 KiB on the smallest."""
    limit = {8: 99, 9: 227, 12: 99}[capability[0]] * 1024
    for N in (15, 24, 96, 192, 288, 384, 768, 4608, 6144):
        for K in (24, 96, 100, 192, 768, 6144):
            for narrow, residual in ((True, False), (False, True), (False, False)):
                for fp8 in (False, True):
                    c = default_quantized_gemm_config(
                        M, N, K, 132, capability, narrow, residual, gelu=narrow, fp8=fp8
                    )
                    assert (c.block_m + c.block_n) * c.block_k * c.num_stages <= limit
                    assert not c.tma or (K % 16 == 0 and capability >= (9, 0))
                    assert not c.tma_store or (c.tma and N % 16 == 0 and narrow)

"""LayerNorm, linear, MLP, patch embedding, merging and pooling against the fp64 oracle."""

from __future__ import annotations

import functools

import pytest
import torch

from fastswin import ops
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
HALF_DTYPES = DTYPES[1:]  # the matrix products are written for tensor cores
WIDE = torch.float64


#: Operators whose second run was compared: the interpreter runs programs one after another, so one
#: problem of each shows whether a run leaves anything behind.
_repeated: set[str] = set()


def check(function, made: dict, dtype: torch.dtype) -> None:
    """Kernel, eager in ``dtype`` and oracle in fp64 on the same inputs, which stay as they are."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in made.items()}
    same = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in made.items()
    }
    before = {k: v.clone() for k, v in made.items() if isinstance(v, torch.Tensor)}
    first = function(**made, impl="triton")
    assert all(torch.equal(made[k], v) for k, v in before.items())
    repeats = 2 if torch.cuda.is_available() else int(function.__name__ not in _repeated)
    _repeated.add(function.__name__)
    for _ in range(repeats):
        assert torch.equal(first, function(**made, impl="triton"))
    if "dtype" in made:
        wide["dtype"] = WIDE
    oracle = function(**wide, impl="reference")
    eager = function(**same, impl="reference")
    assert_close_to_oracle(first, eager, oracle, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(5, 7, 96), (3, 128), (17, 48), (9, 100), (1, 1), (4, 3072)], ids=str
)
@pytest.mark.parametrize("extras", ["plain", "affine", "offset", "residual"])
def test_layer_norm(shape, dtype, extras, randn):
    C = shape[-1]
    made = {"x": randn(*shape, dtype=dtype, spread=3.0)}
    if extras != "plain":
        made |= {"weight": 1 + 0.3 * randn(C), "bias": randn(C)}
    if extras == "offset":
        made["offset"] = randn(C)
    if extras == "residual":
        made["residual"] = randn(*shape, dtype=dtype)
    check(ops.layer_norm, made, dtype)


def test_layer_norm_of_large_values(randn):
    """SWO-21: 300 squared is infinite in fp16, so sums are fp32."""
    x = (300.0 * torch.sign(randn(64, 96)) + randn(64, 96)).half()
    out = ops.layer_norm(x, impl="triton")
    expected = torch.nn.functional.layer_norm(x.float(), (96,))
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=0)


def test_layer_norm_in_place(randn):
    x, h = randn(6, 96), randn(6, 96)
    weight, bias = randn(96), randn(96)
    expected = ops.layer_norm(h, weight, bias, residual=x, impl="reference")
    assert ops.layer_norm(h, weight, bias, residual=x, out=x, impl="triton") is x
    torch.testing.assert_close(x, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(70, 96, 96), (33, 72, 100), (130, 256, 64), (1, 10, 768)], ids=str
)
@pytest.mark.parametrize("epilogue", ["none", "bias", "gelu", "residual", "all"])
def test_linear(shape, dtype, epilogue, randn):
    M, N, K = shape
    made = {"x": randn(M, K, dtype=dtype), "weight": randn(N, K, dtype=dtype, spread=K**-0.5)}
    if epilogue != "none":
        made["bias"] = randn(N)
    if epilogue in ("gelu", "all"):
        made["activation"] = "gelu"
    if epilogue in ("residual", "all"):
        made["residual"] = randn(M, N, dtype=dtype)
    check(ops.linear, made, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(70, 288, 96), (49, 96, 192), (33, 72, 64), (5, 40, 384)], ids=str
)
@pytest.mark.parametrize(
    ("activation", "with_offset"),
    [(None, False), ("gelu", True)],
    ids=["plain", "gelu-offset"],
)
def test_layer_norm_linear(shape, dtype, activation, with_offset, randn):
    """The offset goes into the rows before the product, GELU comes after it: tried together."""
    M, N, K = shape
    made = {
        "x": randn(M, K, dtype=dtype, spread=2.0),
        "weight": randn(N, K, dtype=dtype, spread=K**-0.5),
        "bias": randn(N),
        "activation": activation,
        "layer_norm_eps": 1e-5,
        "offset": randn(K) if with_offset else None,
    }
    check(ops.linear, made, dtype)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "with_offset"),
    [(32, False), (32, True), (64, True), (96, False), (96, True), (128, True)],
    ids=str,
)
@pytest.mark.parametrize("form", ["norm-first", "norm-last"])
def test_mlp(channels, dtype, form, with_offset, randn):
    """A power of two, one and two column parts; the offset is added to either as it is read."""
    C = channels
    made = {
        "x": randn(70, C, dtype=dtype),
        "fc1_weight": randn(4 * C, C, dtype=dtype, spread=C**-0.5),
        "fc1_bias": randn(4 * C),
        "fc2_weight": randn(C, 4 * C, dtype=dtype, spread=(4 * C) ** -0.5),
        "fc2_bias": randn(C),
        "offset": randn(C) if with_offset else None,
    }
    if form == "norm-last":
        made |= {"norm_weight": 1 + 0.3 * randn(C), "norm_bias": randn(C)}
    check(ops.mlp, made, dtype)


@pytest.mark.parametrize("operator", ["linear", "layer-norm-linear", "mlp"])
def test_fp32_products_are_the_librarys(operator, randn):
    """Chains of K multiply-adds are two to three times as far from fp64 as the library's sums."""
    x, fc1, fc2 = randn(70, 64), randn(256, 64, spread=0.1), randn(64, 256, spread=0.1)
    if operator == "mlp":
        call = functools.partial(ops.mlp, x, fc1, randn(256), fc2, randn(64))
    else:
        eps = 1e-5 if operator == "layer-norm-linear" else None
        call = functools.partial(ops.linear, x, fc1, layer_norm_eps=eps)
    with pytest.raises(RuntimeError, match="float32 products are faster and closer"):
        call(impl="triton")
    assert torch.equal(call(), call(impl="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(100352, 96), (25088, 192), (100352, 128)], ids=str)
def test_mlp_that_fills_the_card(shape, dtype, randn):
    M, C = shape
    made = {
        "x": randn(M, C, dtype=dtype),
        "fc1_weight": randn(4 * C, C, dtype=dtype, spread=C**-0.5),
        "fc1_bias": randn(4 * C),
        "fc2_weight": randn(C, 4 * C, dtype=dtype, spread=(4 * C) ** -0.5),
        "fc2_bias": randn(C),
    }
    check(ops.mlp, made, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(100352, 384, 96), (25088, 768, 192), (6272, 1536, 384), (1568, 3072, 768), (1568, 768, 3072),
     (49, 768, 3072), (196, 1536, 384), (9216, 6144, 1536)],
    ids=str,
)  # fmt: skip
def test_linear_at_model_sizes(shape, dtype, randn):
    M, N, K = shape
    made = {
        "x": randn(M, K, dtype=dtype),
        "weight": randn(N, K, dtype=dtype, spread=K**-0.5),
        "bias": randn(N),
        "activation": "gelu",
        "residual": randn(M, N, dtype=dtype),
    }
    check(ops.linear, made, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(200704, 288, 96), (100352, 384, 128), (6272, 576, 192), (196, 1152, 384)], ids=str
)
def test_layer_norm_linear_at_model_sizes(shape, dtype, randn):
    M, N, K = shape
    made = {
        "x": randn(M, K, dtype=dtype),
        "weight": randn(N, K, dtype=dtype, spread=K**-0.5),
        "bias": randn(N),
        "layer_norm_eps": 1e-5,
    }
    check(ops.linear, made, dtype)


def test_gelu_is_erf_gelu_to_a_rounding(device):
    """On an identity product: within one half-precision rounding of erf GELU over its range."""
    x = torch.linspace(-9, 9, 16 * 257, device=device).view(-1, 16).half()
    identity = torch.eye(16, device=device, dtype=torch.float16)
    out = ops.linear(x, identity, activation="gelu", impl="triton").double()
    truth = torch.nn.functional.gelu(x.double())
    bound = 2**-11 * truth.abs() + 1e-4
    assert bool(((out - truth).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(7, 10, 8), (10, 7, 8), (7, 7, 8), (1, 1, 8), (6, 4, 96)], ids=str
)
@pytest.mark.parametrize("form", ["norm", "plain", "norm-offset", "offset"])
def test_gather_neighbours(shape, dtype, form, randn):
    """Odd sides are padded at the bottom and right, and LayerNorm sees the zeros (SWO-01)."""
    H, W, C = shape
    made = {
        "x": randn(2, H, W, C, dtype=dtype),
        "layer_norm_eps": 1e-5 if "norm" in form else None,
        "offset": randn(C) if "offset" in form else None,
    }
    check(ops.gather_neighbours, made, dtype)


def test_gather_order_is_the_official_one(device):
    x = torch.arange(16.0, device=device).view(1, 4, 4, 1)
    for impl in ("triton", "reference"):
        out = ops.gather_neighbours(x, impl=impl)
        assert out[0, 0, 1].tolist() == [2.0, 6.0, 3.0, 7.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7, 7, 96), (1, 1, 32), (12, 5, 768), (3, 3, 100)], ids=str)
def test_norm_pool(shape, dtype, randn):
    C = shape[-1]
    made = {
        "x": randn(3, *shape, dtype=dtype),
        "weight": 1 + 0.3 * randn(C),
        "bias": randn(C),
        "offset": randn(C),
    }
    check(ops.norm_pool, made, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patch", [1, 2, 4])
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "bare"])
def test_patch_embed(dtype, patch, norm, randn):
    """Strided (channels-last, cropped) images whose sides are no multiple of the patch."""
    images = randn(2, 14, 23, 3).permute(0, 3, 1, 2)[:, :, 1:, 2:]
    made = {
        "images": images,
        "weight": randn(48, 3, patch, patch, dtype=dtype, spread=0.2),
        "bias": randn(48),
        "dtype": dtype,
    }
    if norm:
        made |= {"norm_weight": 1 + 0.3 * randn(48), "norm_bias": randn(48)}
    check(ops.patch_embed, made, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("C", "norm"), [(48, True), (64, True), (48, False)])
def test_patch_embed_leaves_its_rows_statistics(dtype, C, norm, randn):
    """Of what is stored; rows of two images, a block of rows that no image fills, a large mean."""
    vectors = (1 + 0.3 * randn(C), randn(C) + 50.0) if norm else (None, None)
    images, weight, bias = randn(2, 3, 23, 18), randn(C, 3, 4, 4, spread=0.2), randn(C) + 9.0
    stats = torch.full((2, 1, 60), float("nan"), device=images.device)
    found = ops.patch_embed(
        images, weight, bias, *vectors, dtype=dtype, impl="triton", stats_out=stats
    )
    expected = torch.empty(2, 1, 60, dtype=torch.float64, device=images.device)
    write_stats_ref(found, expected)
    assert torch.allclose(stats.double(), expected, rtol=1e-5)
    wrong = torch.empty(2, 2, 60, device=images.device)
    with pytest.raises(ValueError, match="stats_out"):
        ops.patch_embed(images, weight, bias, *vectors, dtype=dtype, stats_out=wrong)


def test_patch_embed_of_grey_images(randn):
    made = {
        "images": randn(2, 1, 28, 28),
        "weight": randn(64, 1, 1, 1),
        "bias": randn(64),
        "norm_weight": randn(64),
        "norm_bias": randn(64),
        "dtype": torch.float32,
    }
    check(ops.patch_embed, made, torch.float32)


EMPTY = {
    "layer_norm": lambda r, i: ops.layer_norm(r(0, 96), impl=i),
    "linear": lambda r, i: ops.linear(r(0, 96).half(), r(32, 96).half(), impl=i),
    "ln-linear": lambda r, i: ops.linear(
        r(0, 96).half(), r(32, 96).half(), layer_norm_eps=1e-5, impl=i
    ),
    "mlp": lambda r, i: ops.mlp(
        r(0, 32).half(), r(128, 32).half(), r(128), r(32, 128).half(), r(32), impl=i
    ),
    "gather": lambda r, i: ops.gather_neighbours(r(0, 7, 8, 16), impl=i),
    "pool": lambda r, i: ops.norm_pool(r(0, 7, 7, 16), r(16), r(16), impl=i),
    "patch": lambda r, i: ops.patch_embed(r(0, 3, 8, 8), r(16, 3, 4, 4), r(16), impl=i),
}
EMPTY_SHAPES = {
    "layer_norm": (0, 96), "linear": (0, 32), "ln-linear": (0, 32), "mlp": (0, 32),
    "gather": (0, 4, 4, 64), "pool": (0, 16), "patch": (0, 2, 2, 16),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("name", EMPTY)
def test_empty_batch(name, impl, randn):
    assert EMPTY[name](randn, impl).shape == EMPTY_SHAPES[name]


REFUSALS = {
    "ln-weight": (lambda r: ops.layer_norm(r(4, 8), r(9)), r"weight must be \[8\]"),
    "ln-residual": (lambda r: ops.layer_norm(r(4, 8), residual=r(4, 9)), "residual must be"),
    "ln-impl": (lambda r: ops.layer_norm(r(4, 8), impl="x"), "impl must be"),
    "linear-k": (lambda r: ops.linear(r(4, 8), r(16, 9)), "9 input channels"),
    "linear-bias": (lambda r: ops.linear(r(4, 8), r(16, 8), r(15)), r"bias must be \[16\]"),
    "linear-act": (lambda r: ops.linear(r(4, 8), r(16, 8), activation="relu"), "activation"),
    "linear-both": (
        lambda r: ops.linear(r(4, 8), r(8, 8), residual=r(4, 8), layer_norm_eps=1.0), "exclude",
    ),
    "mlp-fc2": (lambda r: ops.mlp(r(4, 8), r(32, 8), r(32), r(9, 32), r(8)), "fc2_weight must be"),
    "mlp-norm": (
        lambda r: ops.mlp(r(4, 8), r(32, 8), r(32), r(8, 32), r(8), norm_weight=r(8)), "together",
    ),
    "gather-rank": (lambda r: ops.gather_neighbours(r(4, 8, 8)), r"x must be \[B, H, W, C\]"),
    "pool-bias": (lambda r: ops.norm_pool(r(1, 2, 2, 8), r(8), r(7)), r"bias must be \[8\]"),
    "patch-channels": (
        lambda r: ops.patch_embed(r(1, 4, 8, 8), r(16, 3, 4, 4), r(16)), "images must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_arguments_are_named(name, randn):
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        call(randn)


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_explicit_triton_says_why_not(name, randn):
    def half(*shape):
        return randn(*shape, dtype=torch.float16)

    if name == "linear":
        call = functools.partial(ops.linear, half(4, 100), half(8, 100), layer_norm_eps=1e-5)
    else:
        call = functools.partial(
            ops.mlp, half(4, 512), half(2048, 512), randn(2048), half(512, 2048), randn(512)
        )
    with pytest.raises(RuntimeError, match=r"powers of two|exceed"):
        call(impl="triton")


GRADIENTS = {
    "layer-norm-offset": lambda x, r, **k: ops.layer_norm(x, offset=r(32), **k),
    "linear": lambda x, r, **k: ops.linear(x.half(), r(16, 32).half(), **k),
    "layer-norm-linear": lambda x, r, **k: ops.linear(
        x.half(), r(16, 32).half(), layer_norm_eps=1e-5, **k
    ),
    "mlp": lambda x, r, **k: ops.mlp(
        x.half(), r(128, 32).half(), r(128), r(32, 128).half(), r(32), **k
    ),
    "gather": lambda x, r, **k: ops.gather_neighbours(x.view(1, 2, 2, 32), **k),
    "pool": lambda x, r, **k: ops.norm_pool(x.view(1, 2, 2, 32), r(32), r(32), **k),
    "patch": lambda x, r, **k: ops.patch_embed(x.view(1, 2, 8, 8), r(16, 2, 4, 4), r(16), **k),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_needed_gradient_is_never_dropped(name, randn):
    """Kernels without a backward must refuse, and "auto" must take the reference."""
    x = randn(4, 32).requires_grad_()
    with pytest.raises(RuntimeError, match="no backward"):
        GRADIENTS[name](x, randn, impl="triton")
    GRADIENTS[name](x, randn, impl="auto").float().square().sum().backward()
    assert x.grad.abs().sum() > 0
    with torch.no_grad():
        assert not GRADIENTS[name](x, randn, impl="triton").requires_grad

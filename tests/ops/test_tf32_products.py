"""Products of fp32 operands on tensor cores: ``ops.linear`` and ``ops.mlp`` in tf32.

The interpreter multiplies in fp32, so the gate here is eager with its operands cut to TF32, as
tensor cores cut them; on a GPU eager is the library's tf32.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fastswin import ops
from fastswin.bench.precision import fp32_scope
from fastswin.engine.prepare import round_to_tf32
from fastswin.engine.tf32 import ROUNDED_TILES
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    OneShotConfig,
    default_tf32_config,
    default_tf32_layer_norm_config,
)
from fastswin.ops.mlp.config import MlpConfig, default_tf32_mlp_config
from fastswin.ops.window_attention.config import default_config as attention_config
from fastswin.testing.tolerance import assert_close_to_oracle

GPU = torch.cuda.is_available()


def cut(t: torch.Tensor) -> torch.Tensor:
    """What tensor cores read of fp32 numbers."""
    return t if GPU else (t.view(torch.int32) & -(1 << 13)).view(torch.float32)


def check(function, made: dict, products: str) -> None:
    """Twice the same bits, inside the gate of eager in tf32 (fp32 for "tf32x3")."""
    if products == "tf32":  # as the engine does
        matrices = ("weight", "fc1_weight", "fc2_weight")
        made = made | {k: round_to_tf32(v) for k, v in made.items() if k in matrices}
    tensors = {k: v for k, v in made.items() if isinstance(v, torch.Tensor)}
    wide = made | {k: v.double() for k, v in tensors.items()}
    cut_off = made
    if products == "tf32":
        names = ("x", "weight", "fc1_weight", "fc2_weight")
        cut_off = made | {k: cut(v) for k, v in tensors.items() if k in names}
    run = functools.partial(function, **made, input_precision=products, impl="triton")
    first = run()
    assert torch.equal(first, run())
    with fp32_scope(tf32=products == "tf32"):
        eager = function(**cut_off, impl="reference")
    oracle = function(**wide, impl="reference")
    assert_close_to_oracle(first, eager, oracle, torch.float32)


@pytest.mark.parametrize("products", ["tf32", "tf32x3"])
@pytest.mark.parametrize(
    ("shape", "config", "epilogue"),
    [
        ((70, 96, 96), None, "all"),
        ((33, 72, 100), GemmConfig(32, 64, 32, 4, 2), "gelu"),
        ((130, 136, 64), GemmConfig(64, 64, 32, 4, 2, tma=True, persistent=1), "none"),
    ],
    ids=["heuristic", "ragged", "persistent"],
)
def test_linear(shape, config, epilogue, products, randn):
    M, N, K = shape
    made = {"x": randn(M, K), "weight": randn(N, K, spread=K**-0.5), "config": config}
    if epilogue != "none":
        made |= {"bias": randn(N), "activation": "gelu"}
    if epilogue == "all":
        made["residual"] = randn(M, N)
    check(ops.linear, made, products)


@pytest.mark.parametrize("shape", [(40, 96, 96), (33, 40, 64)], ids=str)
def test_layer_norm_linear(shape, randn):
    M, N, K = shape
    made = {
        "x": randn(M, K, spread=2.0),
        "weight": randn(N, K, spread=K**-0.5),
        "bias": randn(N),
        "layer_norm_eps": 1e-5,
        "offset": randn(K),
    }
    check(ops.linear, made, "tf32")


@pytest.mark.parametrize(("form", "channels"), [("norm-first", 96), ("norm-last", 32)], ids=str)
def test_mlp(form, channels, randn):
    C = channels
    made = {
        "x": randn(40, C),
        "fc1_weight": randn(4 * C, C, spread=C**-0.5),
        "fc1_bias": randn(4 * C),
        "fc2_weight": randn(C, 4 * C, spread=(4 * C) ** -0.5),
        "fc2_bias": randn(C),
        "offset": randn(C),
        "config": MlpConfig(64, 32, 4, 2),
    }
    if form == "norm-last":
        made |= {"norm_weight": 1 + 0.3 * randn(C), "norm_bias": randn(C)}
    check(ops.mlp, made, "tf32")


def test_gelu_of_three_products_is_exact(device):
    """tf32x3 stands for fp32, whose GELU the fitted form is not: 2.8e-5 from it."""
    x = torch.linspace(-9, 9, 16 * 257, device=device).view(-1, 16)
    identity = torch.eye(16, device=device)
    out = ops.linear(x, identity, activation="gelu", impl="triton", input_precision="tf32x3")
    truth = torch.nn.functional.gelu(x.double())
    assert (out - truth).abs().max().item() < 1e-6


@pytest.mark.parametrize("channels", [96, 32], ids=str)
def test_patch_embed(channels, randn):
    C = channels
    made = {
        "images": randn(2, 3, 9, 12), "weight": randn(C, 3, 4, 4, spread=0.15), "bias": randn(C),
        "norm_weight": 1 + 0.3 * randn(C), "norm_bias": randn(C),
    }  # fmt: skip

    check(ops.patch_embed, made, "tf32x3")


def test_layer_norm_writes_the_nearest_tf32_numbers(randn):
    x, offset = randn(9, 96, spread=3.0), randn(96)
    exact = ops.layer_norm(x, offset=offset, impl="triton")
    rounded = ops.layer_norm(x, offset=offset, impl="triton", tf32=True)
    assert torch.equal(rounded, round_to_tf32(exact))
    with pytest.raises(ValueError, match="tf32 needs an fp32 result"):
        ops.layer_norm(x.half(), tf32=True)


@pytest.mark.gpu
def test_hopper_product_of_tf32_numbers(randn):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Hopper product needs compute capability 9.0")
    made = {"x": randn(700, 160), "weight": randn(264, 160, spread=0.1), "bias": randn(264)}

    def product(x, **options):
        if options["impl"] == "triton":  # the library rounds by itself
            x, options["config"] = round_to_tf32(x), ROUNDED_TILES
        return ops.linear(x, activation="gelu", **options)

    check(product, made, "tf32")


@pytest.mark.parametrize("version", [1, 2], ids="v{}".format)
def test_window_attention_of_three_products(version, randn):
    """fp32's gate on a padded and shifted map."""
    made = {"qkv": randn(1, 5, 7, 3 * 32), "bias": randn(2, 16, 16), "qkv_bias": randn(96)}
    if version == 2:
        made["logit_scale"] = torch.full((2,), 2.3, device=made["qkv"].device)
    fixed = {"num_heads": 2, "window_size": (4, 4), "shift_size": (2, 1)}
    attend = functools.partial(ops.window_attention, **fixed)
    check(attend, made, "tf32x3")


def test_gradient_of_three_products_is_that_of_ieee(randn):
    qkv = randn(1, 2, 2, 48)
    gradients = []
    for products in ("tf32x3", "ieee"):
        leaf = qkv.clone().requires_grad_()
        out = ops.window_attention(
            leaf, num_heads=1, window_size=(2, 2), input_precision=products, impl="triton"
        )
        gradients.append(torch.autograd.grad(out, leaf, qkv[..., :16].cos())[0])
    assert torch.equal(*gradients)


def test_rounding_keeps_the_nan_of_a_gpu(device):
    """0x7fffffff, what a GPU's arithmetic makes: half of the last kept place more would wrap it."""
    x = torch.zeros(16, 16, device=device)
    x[3, 5] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    eye = torch.eye(16, device=device)
    out = ops.linear(x, eye, impl="triton", input_precision="tf32")
    assert out[3].isnan().all()
    assert not out[:3].isnan().any()


def test_matrices_are_rounded_to_the_nearest(randn):
    """Ten bits behind the point, off by half of the last one at most; twice changes nothing."""
    matrix = randn(64, 48).cpu()
    rounded = round_to_tf32(matrix)
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros(64, 48, dtype=torch.int32))
    off = (rounded.double() - matrix.double()).abs() / matrix.double().abs()
    assert 2**-12 < off.max().item() <= 2**-11
    assert torch.equal(round_to_tf32(rounded), rounded)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0)], ids=str)
def test_tiles_fit_shared_memory(capability):
    """99 KiB on 8.6, 227 on 9.0 and 10.0; the copy engine only where there is one."""
    limit = (99 if capability[0] == 8 else 227) * 1024
    for M, N, K in ((100352, 384, 96), (1568, 3072, 768), (49, 768, 3072), (7, 40, 100)):
        tiles = default_tf32_config(M, N, K, 132, capability)
        assert (tiles.block_m + tiles.block_n) * tiles.block_k * 4 * tiles.num_stages <= limit
        assert tiles.tma <= (capability[0] >= 9)
    for C in (96, 128, 192):
        tiles = default_tf32_mlp_config(C, capability)
        assert 2 * C * tiles.block_h * 4 * tiles.num_stages + 4 * tiles.block_m * C <= limit
        norm = default_tf32_layer_norm_config(100352, 3 * C, C, 132, capability)
        assert norm is not None
        held = norm.block_m * C * 4 + norm.num_stages * norm.block_n * C * 4
        assert held <= limit


def test_attention_tiles_of_tensor_cores():
    """tf32 walks over V1's windows and holds 144 keys; three products take one head a program."""
    tiles = functools.partial(attention_config, 2048, head_dim=32, itemsize=4, multiprocessors=132)
    assert tiles(49, 3).heads_per_program == 3  # IEEE
    assert tiles(49, 3, tensor_cores=True).heads_per_program == 1
    tf32 = functools.partial(tiles, tensor_cores=True, tf32=True)
    assert tf32(49, 3, runs=True).programs > 0 == tf32(64, 3).programs
    assert tf32(144, 4).key_tiles == (128, 16)
    assert tf32(144, 4, capability=(8, 6)).key_tiles == tf32(256, 4).key_tiles == ()
    assert tiles(144, 4, tensor_cores=True).key_tiles == ()


@pytest.mark.parametrize("name", ["half", "word", "one-shot"])
def test_bad_arguments_are_named(name, randn):
    x, weight = randn(32, 64), randn(48, 64)
    if name == "word":
        with pytest.raises(ValueError, match="input_precision must be None, 'tf32' or 'tf32x3'"):
            ops.linear(x, weight, input_precision="bf16x3")
        bias, shrink = torch.zeros(48), (weight.t(), torch.zeros(64))
        with pytest.raises(ValueError, match="input_precision must be None or 'tf32'"):
            ops.mlp(x, weight, bias, *shrink, input_precision="tf32x3")
    elif name == "one-shot":
        config = OneShotConfig(16, 16, 4)
        with pytest.raises(RuntimeError, match="one-shot products hold half-precision operands"):
            ops.linear(x, weight, impl="triton", config=config, input_precision="tf32")
    else:  # half precision has nothing to cut
        half = ops.linear(x.half(), weight.half(), impl="triton", input_precision="tf32")
        assert torch.equal(half, ops.linear(x.half(), weight.half(), impl="triton"))


def test_layer_norm_tiles(randn):
    """A configuration of the fused norm is taken in tf32 as in half precision."""
    made = {
        "x": randn(40, 64), "weight": randn(96, 64, spread=0.1), "layer_norm_eps": 1e-5,
        "config": LayerNormLinearConfig(32, 32, 2, 4, 2),
    }  # fmt: skip
    check(ops.linear, made, "tf32")

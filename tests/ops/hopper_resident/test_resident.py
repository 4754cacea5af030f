"""The resident kernels on a card: values against fp64, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.ops.hopper_resident import launch
from fastswin.ops.hopper_resident.config import (
    ResidentMlpConfig,
    ResidentProductConfig,
    why_no_resident,
)
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

EPS = 1e-5
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: An edge inside a tile and groups without one; Swin-T's first stage at batch 32; a part of a tile.
ROWS = (4233, 100352, 7)

#: N and C: qkv of Swin-T and Swin-B, a last step that begins early.
PRODUCTS = {"tiny": (288, 96), "base": (384, 128), "no multiple of a step": (200, 128)}

#: Steps, groups and buffers; every line is a binary.
PRODUCT_CONFIGS = {
    "default": ResidentProductConfig(),
    "three groups": ResidentProductConfig(groups=3),
    "steps of 32": ResidentProductConfig(32, 4, 3),
    "one buffer": ResidentProductConfig(64, 3, 1),
}

#: Channels and hidden units of a step.
MLP_FORMS = [(96, 64), (96, 32), (128, 32)]


@pytest.fixture
def cuda():
    device = torch.device("cuda")
    if reason := why_no_resident(device, torch.float16):
        pytest.skip(reason)
    return device


@pytest.fixture
def launches(monkeypatch):
    """Configurations that the resident launchers have been called with, in order."""
    found = []

    def spy(launcher):
        def run(*arguments, **options):
            found.append(next(a for a in arguments if type(a).__name__.startswith("Resident")))
            return launcher(*arguments, **options)

        return run

    for name in ("resident_product_fwd", "resident_mlp_fwd"):
        monkeypatch.setattr(launch, name, spy(getattr(launch, name)))
    return found


def draw(device, *shape, dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator(device).manual_seed(seed)
    return (spread * torch.randn(*shape, device=device, generator=generator)).to(dtype)


def product_operands(device, M, N, C, dtype, offset):
    x, bias = draw(device, M, C, dtype=dtype, spread=2.0), draw(device, N, seed=1)
    w = draw(device, N, C, dtype=dtype, seed=2, spread=C**-0.5)
    return x, w, bias, draw(device, C, seed=3) if offset else None


def eager_product(x, w, bias, offset, dtype):
    """In x's dtype, or the oracle where ``dtype`` is float64."""
    x = x.to(dtype) if offset is None else x.to(dtype) + offset.to(dtype)
    return F.linear(F.layer_norm(x, x.shape[-1:], eps=EPS), w.to(dtype), bias.to(dtype))


def mlp_operands(device, M, C, dtype, post_norm, offset):
    x, H = draw(device, M, C, dtype=dtype, spread=2.0), 4 * C
    fc1 = draw(device, H, C, dtype=dtype, seed=1, spread=C**-0.5), draw(device, H, seed=2)
    fc2 = draw(device, C, H, dtype=dtype, seed=3, spread=H**-0.5), draw(device, C, seed=4)
    norm = (draw(device, C, seed=5), draw(device, C, seed=6)) if post_norm else (None, None)
    return x, (*fc1, *fc2), norm, draw(device, C, seed=7) if offset else None


def eager_mlp(x, weights, norm, offset, dtype):
    """In x's dtype, or the oracle where ``dtype`` is float64."""
    w1, b1, w2, b2 = (t.to(dtype) for t in weights)
    x = x.to(dtype) if offset is None else x.to(dtype) + offset.to(dtype)
    h = x if norm[0] is not None else F.layer_norm(x, x.shape[-1:], eps=EPS)
    h = F.linear(F.gelu(F.linear(h, w1, b1)), w2, b2)
    if norm[0] is not None:
        h = F.layer_norm(h, x.shape[-1:], norm[0].to(dtype), norm[1].to(dtype), EPS)
    return x + h


def run_mlp(x, weights, norm, offset, config, **options):
    return ops.mlp(
        x, *weights, norm_weight=norm[0], norm_bias=norm[1], offset=offset, eps=EPS,
        impl="triton", config=config, **options,
    )  # fmt: skip


def run_product(x, w, bias, offset, config, **options):
    return ops.linear(
        x, w, bias, layer_norm_eps=EPS, offset=offset, impl="triton", config=config, **options
    )


def check_product(operands, runs, dtype):
    eager, oracle = (eager_product(*operands, d) for d in (dtype, torch.float64))
    assert_close_to_oracle(runs[0], eager, oracle, dtype)
    assert all(torch.equal(runs[0], run) for run in runs[1:])


def check_mlp(operands, runs, dtype):
    eager, oracle = (eager_mlp(*operands, d) for d in (dtype, torch.float64))
    assert_close_to_oracle(runs[0], eager, oracle, dtype)
    assert all(torch.equal(runs[0], run) for run in runs[1:])


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("shape", PRODUCTS.values(), ids=PRODUCTS)
def test_product(shape, offset, M, dtype, cuda, launches):
    operands = product_operands(cuda, M, *shape, dtype, offset)
    with PoisonEmpty():
        runs = [run_product(*operands, ResidentProductConfig()) for _ in range(3)]
    assert launches == [ResidentProductConfig()] * 3
    check_product(operands, runs, dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("config", PRODUCT_CONFIGS.values(), ids=PRODUCT_CONFIGS)
def test_product_forms(config, bias, cuda, launches):
    x, w, b, offset = product_operands(cuda, 4233, 200, 96, torch.float16, True)
    given = x, w, b if bias else None, offset
    out = torch.full((4233, 200), float("nan"), dtype=torch.float16, device=cuda)
    assert run_product(*given, config, out=out) is out
    runs = [out, *(run_product(*given, config) for _ in range(2))]
    assert launches == [config] * 3
    check_product((x, w, b if bias else torch.zeros_like(b), offset), runs, torch.float16)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("post_norm", [False, True], ids=["norm first", "norm behind"])
@pytest.mark.parametrize("C", [96, 128])
def test_mlp(C, post_norm, M, dtype, cuda, launches):
    """The third run is in place; 128 channels stream their weights."""
    operands = mlp_operands(cuda, M, C, dtype, post_norm, offset=M != 7)
    config = ResidentMlpConfig(64 if C == 96 else 32)
    stream = operands[0].clone()
    with PoisonEmpty():
        runs = [run_mlp(*operands, config) for _ in range(2)]
        runs.append(run_mlp(stream, *operands[1:], config, out=stream))
    assert runs[2] is stream
    assert launches == [config] * 3
    check_mlp(operands, runs, dtype)


@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("post_norm", [False, True], ids=["norm first", "norm behind"])
@pytest.mark.parametrize(("C", "block_h"), MLP_FORMS)
def test_mlp_forms(C, block_h, post_norm, offset, cuda, launches):
    config = ResidentMlpConfig(block_h)
    operands = mlp_operands(cuda, 4233, C, torch.bfloat16, post_norm, offset)
    out = torch.full_like(operands[0], float("nan"))
    runs = [run_mlp(*operands, config, out=out, pdl=True)]
    runs += [run_mlp(*operands, config) for _ in range(2)]
    assert launches == [config] * 3
    check_mlp(operands, runs, torch.bfloat16)


def test_many_rows_take_it_by_themselves(cuda, launches):
    half = torch.float16
    product = product_operands(cuda, 100352, 288, 96, half, False)
    assert torch.equal(run_product(*product, None), run_product(*product, ResidentProductConfig()))
    mlp = mlp_operands(cuda, 100352, 96, half, False, False)
    assert torch.equal(run_mlp(*mlp, None), run_mlp(*mlp, ResidentMlpConfig()))
    assert launches == [ResidentProductConfig()] * 2 + [ResidentMlpConfig()] * 2
    few = product_operands(cuda, 784, 288, 96, half, False)
    check_product(few, [run_product(*few, None)], half)
    assert len(launches) == 4


def misaligned(t):
    """The same values, two bytes past a multiple of 16."""
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
    moved = room.view(t.shape).copy_(t)
    assert moved.data_ptr() % 16 == 2
    return moved


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_misaligned_rows_take_another_kernel(dtype, cuda, launches):
    x, *rest = product_operands(cuda, 4233, 288, 96, dtype, True)
    check_product((x, *rest), [run_product(misaligned(x), *rest, ResidentProductConfig())], dtype)
    out = misaligned(torch.full((4233, 288), float("nan"), dtype=dtype, device=cuda))
    check_product((x, *rest), [run_product(x, *rest, ResidentProductConfig(), out=out)], dtype)
    x, *rest = mlp_operands(cuda, 4233, 96, dtype, False, True)
    check_mlp((x, *rest), [run_mlp(misaligned(x), *rest, ResidentMlpConfig())], dtype)
    assert launches == []

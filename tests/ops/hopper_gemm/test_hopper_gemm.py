"""The Hopper product on a card: values against fp64, the same bits in every run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastswin import ops
from fastswin.ops.hopper_gemm.config import (
    DEFAULT_BACKWARD,
    DEFAULT_CONFIG,
    HopperGemmConfig,
    why_no_hopper_gemm,
)
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import assert_close_to_oracle

pytestmark = pytest.mark.gpu

#: M, N, K: one tile and fewer steps than stages; edges on every side; one tile more than programs;
#: Swin-T's stage 3 at batch 32, four rounds and halves; halves of which some lie beyond the edge;
#: no halves.
SHAPES = [
    (100, 128, 64), (1000, 328, 136), (133 * 128, 128, 192), (6272, 1536, 384), (5700, 392, 72),
    (6272, 2048, 96),
]  # fmt: skip

#: Tiles, dtype and activation; every line is a binary.
LINEAR = {
    "fp16 gelu": (DEFAULT_CONFIG, torch.float16, "gelu"),
    "fp16 plain": (DEFAULT_CONFIG, torch.float16, None),
    "bf16 gelu": (DEFAULT_CONFIG, torch.bfloat16, "gelu"),
    "groups of 4 warps": (HopperGemmConfig(128, 128, 64, 5, 2, 4, 2), torch.float16, "gelu"),
    "three groups": (HopperGemmConfig(128, 128, 64, 4, 3, 4, 2), torch.float16, "gelu"),
}

#: Dtype, and which of act and db1 are asked for.
BACKWARD = {
    "fp16": (torch.float16, (True, True)),
    "bf16": (torch.bfloat16, (True, True)),
    "bf16 without act": (torch.bfloat16, (False, True)),
    "bf16 without db1": (torch.bfloat16, (True, False)),
}


@pytest.fixture
def cuda():
    device = torch.device("cuda")
    if reason := why_no_hopper_gemm(device, torch.float16, 64, 64):
        pytest.skip(reason)
    return device


def draw(device, *shape, dtype=torch.float32, seed=0, spread=1.0):
    generator = torch.Generator(device).manual_seed(seed)
    return (spread * torch.randn(*shape, device=device, generator=generator)).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("config", "dtype", "activation"), LINEAR.values(), ids=LINEAR)
def test_linear(config, dtype, activation, shape, cuda):
    M, N, K = shape
    x, bias = draw(cuda, M, K, dtype=dtype), draw(cuda, N, seed=1)
    w = draw(cuda, N, K, dtype=dtype, seed=2, spread=K**-0.5)
    with PoisonEmpty():
        runs = [
            ops.linear(x, w, bias, activation=activation, impl="triton", config=config)
            for _ in range(3)
        ]
    eager = F.linear(x, w, bias.to(dtype))
    oracle = F.linear(x.double(), w.double(), bias.double())
    if activation:
        eager, oracle = F.gelu(eager), F.gelu(oracle)
    assert_close_to_oracle(runs[0], eager, oracle, dtype)
    assert all(torch.equal(runs[0], run) for run in runs[1:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_forward(shape, dtype, cuda):
    from fastswin.ops.hopper_gemm.launch import hopper_epilogue_fwd

    M, N, K = shape
    x, bias = draw(cuda, M, K, dtype=dtype), draw(cuda, N, seed=1)
    w = draw(cuda, N, K, dtype=dtype, seed=2, spread=K**-0.5)
    with PoisonEmpty():
        runs = [hopper_epilogue_fwd(x, w, bias) for _ in range(3)]
    pre, act = runs[0]
    eager, oracle = F.linear(x, w, bias.to(dtype)), F.linear(x.double(), w.double(), bias.double())
    assert_close_to_oracle(pre, eager, oracle, dtype)
    assert_close_to_oracle(act, F.gelu(pre), F.gelu(pre.double()), dtype)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "needs"), BACKWARD.values(), ids=BACKWARD)
def test_backward(dtype, needs, shape, cuda):
    from fastswin.ops.hopper_gemm.launch import hopper_epilogue_bwd

    M, N, K = shape
    dy, pre = draw(cuda, M, K, dtype=dtype), draw(cuda, M, N, dtype=dtype, seed=1)
    fc2 = draw(cuda, K, N, dtype=dtype, seed=2, spread=K**-0.5)
    options = dict(zip(("need_act", "need_bias"), needs, strict=True))
    with PoisonEmpty():
        runs = [
            hopper_epilogue_bwd(dy, pre, fc2, **options, config=DEFAULT_BACKWARD) for _ in range(3)
        ]
    act, dpre, db1 = runs[0]
    at = pre.double().requires_grad_()
    F.gelu(at).backward(dy.double() @ fc2.double())
    half = pre.clone().requires_grad_()
    F.gelu(half).backward(dy @ fc2)
    assert_close_to_oracle(dpre, half.grad, at.grad, dtype)
    if needs[0]:
        assert_close_to_oracle(act, F.gelu(pre), F.gelu(pre.double()), dtype)
    if needs[1]:
        assert_close_to_oracle(db1, half.grad.float().sum(0), at.grad.sum(0), db1.dtype)
    assert (act is not None, db1 is not None) == needs
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True) if a is not None)


def test_rows_that_the_copy_engine_refuses_go_elsewhere(cuda):
    x, w = draw(cuda, 300, 100, dtype=torch.float16), draw(cuda, 96, 100, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="multiple of 8"):
        ops.linear(x, w, impl="triton", config=DEFAULT_CONFIG)
    assert ops.linear(x, w).shape == (300, 96)


@pytest.mark.parametrize("batch", [8, 32, 256], ids="batch {}".format)
@pytest.mark.parametrize("activation", ["gelu", None])
def test_launched_ahead_it_waits_for_the_norm_before_it(activation, batch, cuda):
    """A chain of blocks' halves in one stream: what each kernel reads, the one before has written.

    The library's product in between neither waits nor triggers; memory comes from the caching
    allocator, so that a kernel that is early writes over what another still reads.
    """
    C, N, M = 384, 1536, 196 * batch
    x = draw(cuda, M, C, dtype=torch.float16)
    grow = draw(cuda, N, C, dtype=torch.float16, seed=1, spread=C**-0.5)
    shrink = draw(cuda, C, N, dtype=torch.float16, seed=2, spread=N**-0.5)
    bias = draw(cuda, N, seed=3)

    def chain(pdl):
        stream = x.clone()
        for _ in range(8):
            h = ops.layer_norm(stream, impl="triton", pdl=pdl)
            h = ops.linear(
                h, grow, bias, activation=activation, impl="triton", config=DEFAULT_CONFIG, pdl=pdl
            )
            stream.addmm_(h, shrink.T)
        return stream

    with PoisonEmpty():
        plain = chain(False)
        ahead = [chain(True) for _ in range(3)]
    assert plain.isfinite().all()
    assert all(torch.equal(plain, run) for run in ahead)

"""Precisions mean what they say and leave torch's own switches alone."""

from __future__ import annotations

import pytest
import torch
from engine_cases import cpu_engine, images_like, tiny

from fastswin.engine.precision import PRECISIONS, matmul_mode

GPU = torch.device("cuda")  # only switches are touched: no GPU is needed


def switches() -> dict[str, str]:
    backends = torch.backends
    return {
        "all": backends.fp32_precision,
        "matmul": backends.cuda.matmul.fp32_precision,
        "cudnn": backends.cudnn.fp32_precision,
        "conv": backends.cudnn.conv.fp32_precision,
        "rnn": backends.cudnn.rnn.fp32_precision,
        "mkldnn": backends.mkldnn.matmul.fp32_precision,
        "fp16_sums": str(backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "bf16_sums": str(backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "benchmark": str(backends.cudnn.benchmark),
        "deterministic": str(backends.cudnn.deterministic),
    }


@pytest.fixture
def matmul_switch():
    """Sets the user's matmul switch and puts it back."""
    before = torch.backends.cuda.matmul.fp32_precision

    def choose(value: str) -> None:
        torch.backends.cuda.matmul.fp32_precision = value

    yield choose
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_engine_leaves_switches_alone(precision):
    before, grad, dtype = switches(), torch.is_grad_enabled(), torch.get_default_dtype()
    legacy = torch.get_float32_matmul_precision()
    model = tiny(1)
    engine = cpu_engine(model, precision)
    logits = engine(images_like(model))
    engine.features(images_like(model))
    assert switches() == before
    assert torch.get_float32_matmul_precision() == legacy
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (grad, dtype)
    assert bool(torch.isfinite(logits).all())
    assert not logits.requires_grad


@pytest.mark.parametrize("user", ["none", "ieee", "tf32"])
@pytest.mark.parametrize(("name", "inside"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_fp32_never_means_tf32(matmul_switch, user, name, inside):
    matmul_switch(user)
    before = switches()
    with matmul_mode(PRECISIONS[name], GPU):
        now = switches()
        assert (now["matmul"], now["conv"]) == (inside, inside)
    assert switches() == before


def test_switches_come_back_after_an_error(matmul_switch):
    matmul_switch("tf32")
    before = switches()
    with pytest.raises(ZeroDivisionError), matmul_mode(PRECISIONS["fp32"], GPU):
        _ = 1 / 0
    assert switches() == before


def test_an_inherited_switch_still_inherits(matmul_switch):
    """torch reports an inheriting switch as its parent's value; writing that back would pin it."""
    matmul_switch("none")
    before, all_before = torch.backends.fp32_precision, switches()
    try:
        torch.backends.fp32_precision = "tf32"
        with matmul_mode(PRECISIONS["fp32"], GPU):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        torch.backends.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before
    assert switches() == all_before
    assert (
        torch.backends.cudnn.allow_tf32
    )  # raises where conv and rnn differ, and stops torch.export


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precisions_touch_no_switch(name):
    before = switches()
    with matmul_mode(PRECISIONS[name], GPU):
        assert switches() == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)],
    ids=["fp32", "fp16", "bf16"],
)
def test_outputs_have_the_engines_dtype(name, dtype):
    model = tiny(2)
    engine = cpu_engine(model, name)
    assert (engine.precision, engine.dtype) == (name, dtype)
    images = images_like(model)
    assert engine(images).dtype == dtype
    assert {f.dtype for f in engine.features(images)} == {dtype}

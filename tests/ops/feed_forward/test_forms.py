"""Fused and epilogue forms of the feed-forward layer against fp64, in the interpreter (fp16)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastswin.ops.feed_forward.backward import feed_forward_bwd
from fastswin.ops.feed_forward.config import (
    EpilogueConfig,
    FeedForwardConfig,
    FusedConfig,
    default_config,
    epilogue_blocker,
    fused_blocker,
)
from fastswin.ops.feed_forward.forward import feed_forward_fwd
from fastswin.ops.feed_forward.register import KEEP_BOTH, KEEP_NOTHING, KEEP_PRE
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
EVERYTHING = [True] * 4
NAMES = ("dx", "dfc1_weight", "dfc1_bias", "dfc2_weight")

POINTERS = FusedConfig(32, 64, 4, 2)
COPY_ENGINE = FusedConfig(16, 64, 4, 1, tma=True, tma_store=True)
ONE_TILE_EACH = EpilogueConfig(32, 64, 16, 4, 2)
PERSISTENT = EpilogueConfig(16, 32, 32, 4, 1, persistent=1, tma_hidden=True)
FORMS = {
    "fused": FeedForwardConfig(POINTERS, POINTERS),
    "fused-tma": FeedForwardConfig(COPY_ENGINE, COPY_ENGINE),
    "epilogue": FeedForwardConfig(ONE_TILE_EACH, ONE_TILE_EACH),
    "epilogue-persistent": FeedForwardConfig(PERSISTENT, PERSISTENT),
    "epilogue-backward": FeedForwardConfig(None, ONE_TILE_EACH),
    "library": FeedForwardConfig(),
}


def operands(randn, rows, C, hidden, dtype, bias=True):
    return {
        "x": randn(rows, C, dtype=dtype, spread=2.0),
        "fc1_weight": randn(hidden, C, dtype=dtype, spread=C**-0.5),
        "fc1_bias": randn(hidden, dtype=dtype) if bias else None,
        "fc2_weight": randn(C, hidden, dtype=dtype, spread=hidden**-0.5),
    }


def run(t, dy, config, keep=None, needs=EVERYTHING, weight_dtype=None):
    keep = keep if keep is not None else KEEP_NOTHING if config.fused else KEEP_PRE
    y, pre, act = feed_forward_fwd(*t.values(), keep, config)
    grads = feed_forward_bwd(
        dy, t["x"], pre if keep else None, act if keep == KEEP_BOTH else None, t["fc1_weight"],
        t["fc1_bias"], t["fc2_weight"], needs, weight_dtype or t["x"].dtype, config,
    )  # fmt: skip
    return {"y": y} | dict(zip(NAMES, grads, strict=True))


def plain(t, dy, cast=None):
    """Eager autograd, in fp64 with ``cast``."""
    leaves = {k: v.to(cast or v.dtype).requires_grad_() for k, v in t.items() if v is not None}
    hidden = F.linear(leaves["x"], leaves["fc1_weight"], leaves.get("fc1_bias"))
    y = F.linear(F.gelu(hidden), leaves["fc2_weight"])
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{k}": g for k, g in zip(leaves, grads, strict=True)}


def judge(actual, t, dy, dtype):
    eager, oracle = plain(t, dy), plain(t, dy, torch.float64)
    for name, truth in oracle.items():
        assert_close_to_oracle(actual[name].to(dtype), eager[name], truth, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [37, 1], ids="{}_rows".format)
@pytest.mark.parametrize("form", FORMS)
def test_every_gradient_matches_fp64(form, rows, dtype, randn):
    t = operands(randn, rows, 48, 128, dtype, bias=rows != 1)
    dy = randn(rows, 48, dtype=dtype)
    needs = [True, True, t["fc1_bias"] is not None, True]
    actual = run(t, dy, FORMS[form], needs=needs)
    judge(actual, t, dy, dtype)
    again = run(t, dy, FORMS[form], needs=needs)
    assert all(torch.equal(actual[n], again[n]) for n in actual)


@pytest.mark.parametrize("form", ["fused-tma", "epilogue"])
def test_one_column_part_and_large_activations(form, randn):
    t = operands(randn, 40, 32, 128, torch.float16)
    t["x"] *= 8.0
    t["fc1_bias"][:4] = torch.tensor([300.0, -300.0, 9.0, -9.0])
    dy = randn(40, 32, dtype=torch.float16)
    judge(run(t, dy, FORMS[form]), t, dy, torch.float16)


@pytest.mark.parametrize("form", ["fused", "fused-tma", "epilogue"])
@pytest.mark.parametrize("only", NAMES)
def test_only_what_is_asked_for(form, only, randn):
    t = operands(randn, 20, 32, 128, torch.float16)
    dy = randn(20, 32, dtype=torch.float16)
    everything = run(t, dy, FORMS[form])
    some = run(t, dy, FORMS[form], needs=[name == only for name in NAMES])
    if form == "epilogue":  # fc2's gradient alone takes PyTorch's GELU
        torch.testing.assert_close(some[only], everything[only], rtol=4e-3, atol=1e-2)
    else:
        assert torch.equal(some[only], everything[only])
    assert all(some[name].numel() == 0 for name in NAMES if name != only)


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form, randn):
    t = operands(randn, 0, 32, 128, torch.float16)
    made = run(t, randn(0, 32, dtype=torch.float16), FORMS[form])
    assert made["y"].shape == made["dx"].shape == (0, 32)
    assert made["dfc1_bias"].shape == (128,)
    assert not any(made[name].any() for name in NAMES[1:])


def test_layouts_and_addresses(randn):
    t = operands(randn, 24, 32, 128, torch.float16)
    dy = randn(24, 32, dtype=torch.float16)
    expected = run(t, dy, FORMS["fused-tma"])
    odd = {}
    for name, value in t.items():  # one element off the alignment of the tensor copy engine
        room = torch.zeros(value.numel() + 1, dtype=value.dtype, device=value.device)
        odd[name] = room[1:].view(value.shape).copy_(value)
    actual = run(odd, dy.t().contiguous().t(), FORMS["fused-tma"])
    assert all(torch.equal(actual[n], expected[n]) for n in actual)


def test_kept_activation_gives_the_same_bits(randn):
    t = operands(randn, 24, 32, 128, torch.float16)
    dy = randn(24, 32, dtype=torch.float16)
    made = [run(t, dy, FORMS["epilogue"], keep) for keep in (KEEP_PRE, KEEP_BOTH)]
    assert all(torch.equal(made[0][n], made[1][n]) for n in made[0])


def test_gradients_of_wider_weights(randn):
    t = operands(randn, 24, 32, 128, torch.float16)
    made = run(t, randn(24, 32, dtype=torch.float16), FORMS["fused"], weight_dtype=torch.float32)
    wide = [made[name].dtype for name in NAMES[1:]]
    assert wide == [torch.float32] * 3


def test_default_forms():
    chosen = {
        (C, capability): default_config(C, 4 * C, C, torch.bfloat16, capability)
        for C in (96, 128, 192, 256, 384, 768, 24)
        for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
    }
    fused = {key for key, config in chosen.items() if config.fused}
    assert fused == {(C, c) for C, c in chosen if C in (96, 128, 192) and c >= (8, 0)}
    assert not any(config.forward.tma for key, config in chosen.items()
                   if key in fused and key[1] != (9, 0))  # fmt: skip
    assert default_config(96, 384, 96, torch.float32, (9, 0)) == FeedForwardConfig()


def test_reasons_against_a_form():
    assert "256 channels exceed 192" in str(fused_blocker(256, 1024, 256))
    assert "powers of two" in str(fused_blocker(24, 128, 24))
    assert "100 hidden" in str(fused_blocker(96, 100, 96))
    assert "64 output" in str(fused_blocker(96, 384, 64))
    assert "multiple of 8" in str(epilogue_blocker(20, 128, 24))
    assert fused_blocker(96, 384, 96) is epilogue_blocker(96, 384, 96) is None
    with pytest.raises(ValueError, match="both be fused or neither"):
        FeedForwardConfig(POINTERS, None)

"""Training steps replayed from CUDA graphs: what is refused, and that they are the same steps."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_swins import our_model

from fastswin import accelerate, capture_training
from fastswin.accelerate.capture import Step
from fastswin.accelerate.casts import product_weights


def small(**options) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {"depths": (2, 2), "num_heads": (1, 2), "embed_dim": 32} | options
    return our_model(1, (56, 40), **settings).train()


def images(seed: int = 1, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 56, 40, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"autocast": torch.float64}, ValueError, "autocast must be None, torch.float16 or"),
        ({"images": torch.randn(3, 56, 40)}, ValueError, r"images must be \[B, channels, h, w\]"),
        ({"images": torch.randn(0, 3, 56, 40)}, ValueError, "B >= 1"),
        ({"model": small().eval()}, ValueError, "model must be in training mode"),
        ({"model": small().requires_grad_(False)}, ValueError, "requires a gradient"),
        ({}, RuntimeError, "CUDA graphs need a GPU, the model is on cpu"),
    ],
    ids=["model", "autocast", "rank", "empty", "eval", "frozen", "cpu"],
)
def test_refusals_name_the_argument(change, error, message):
    arguments = {"model": small(), "images": images(), "autocast": None} | change
    with pytest.raises(error, match=message):
        capture_training(arguments.pop("model"), arguments.pop("images"), **arguments)


def test_weights_cast_together_change_no_bit():
    """Against autocast's own casts: logits and gradients, a frozen layer, a layer left to it."""
    model = small()
    model.layers[0].blocks[0].requires_grad_(False)
    accelerate(model)
    weights = product_weights(model)
    assert set(weights) == {
        n for n, p in model.named_parameters()
        if p.ndim > 1 and not n.endswith("table") and n != "head.weight"
    }  # fmt: skip
    other = copy.deepcopy(model)
    x = images()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = model(x)
    got = Step(other, torch.bfloat16)(x)
    assert torch.equal(got, expected)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(5)).to(got.dtype)
    expected.backward(upstream)
    got.backward(upstream)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        if not theirs.requires_grad:
            assert mine.grad is None
            continue
        assert mine.grad.dtype == torch.float32, name
        assert torch.equal(mine.grad, theirs.grad), name
    assert all(mine is other.get_parameter(name) for name, mine in product_weights(other).items())
    assert torch.equal(Step(other, None)(x), other(x))


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_replayed_steps_are_the_eager_steps(autocast):
    """Bit for bit: optimiser steps, two accumulated batches, frozen layers."""
    plain = small().cuda()
    plain.patch_embed.requires_grad_(False)
    accelerate(plain)
    captured_model = copy.deepcopy(plain)
    captured = capture_training(captured_model, images(9).cuda(), autocast=autocast)
    for step in range(3):
        plain.zero_grad(set_to_none=True)
        captured_model.zero_grad(set_to_none=True)
        for micro in range(2):
            x = images(10 + 2 * step + micro).cuda()
            with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
                expected = plain(x)
            got = captured(x)
            assert torch.equal(got, expected)
            expected.float().square().sum().backward()
            got.float().square().sum().backward()
        for mine, theirs in zip(gradients(captured_model), gradients(plain), strict=True):
            assert torch.equal(mine, theirs)
        with torch.no_grad():
            for model in (plain, captured_model):
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 1e-3 * p.grad


@pytest.mark.gpu
def test_drop_path_draws_anew_in_every_replay():
    model = small(drop_path=0.9).cuda()
    accelerate(model)
    x = images().cuda()
    captured = capture_training(model, x)
    drawn = [captured(x).detach().clone() for _ in range(6)]
    assert any(not torch.equal(drawn[0], other) for other in drawn[1:])


@pytest.mark.gpu
def test_evaluation_takes_any_shape_and_training_refuses_others():
    model = small().cuda()
    captured = capture_training(model, images().cuda())
    with pytest.raises(ValueError, match=r"images must be \(2, 3, 56, 40\)"):
        captured(images(batch=3).cuda())
    captured.eval()
    x = images(batch=3).cuda()
    assert torch.equal(captured(x), model(x))
    assert list(captured.model.state_dict()) == list(model.state_dict())

"""Where fp16 overflows is found and named; the engine never hides it by clamping."""

from __future__ import annotations

import pytest
import torch
from engine_cases import cpu_engine, images_like, largest_difference, tiny


def overflowing(stage: int, block: int, half: str, factor: float = 1e6):
    """A V1 model whose residual stream passes 65504 in one half of one block."""
    model = tiny(1)
    chosen = model.layers[stage].blocks[block]
    layer = chosen.attn.proj if half == "attention" else chosen.mlp.fc2
    with torch.no_grad():
        layer.weight.mul_(factor).clamp_(-6e4, 6e4)  # the weight itself fits fp16
    return model


PLACES = [(0, 0, "attention"), (0, 1, "mlp"), (1, 0, "mlp"), (1, 1, "attention")]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_overflow_is_located(place):
    stage, block, half = place
    model = overflowing(*place)
    images = images_like(model)
    engine = cpu_engine(model, "fp16")
    message = rf"stage {stage}, block {block} \({half}\) at precision 'fp16'; use precision='bf16'"
    with pytest.raises(FloatingPointError, match=message):
        engine.check_finite(images)


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_nothing_is_clamped(place):
    """fp16 shows the overflow as inf or NaN; the advised precision has finite, right logits."""
    model = overflowing(*place)
    images = images_like(model)
    logits = cpu_engine(model, "fp16")(images)
    assert not bool(torch.isfinite(logits).all())
    features = cpu_engine(model, "fp16").features(images)[place[0]]
    assert not bool(torch.isfinite(features).all())
    advised = cpu_engine(model, "bf16")
    assert bool(torch.isfinite(advised(images)).all())
    assert max(r.max_abs for r in advised.check_finite(images)) > 65504
    with torch.no_grad():
        expected = model(images)
    assert largest_difference(advised(images), expected) <= 0.1 * expected.abs().max().item()


def test_overflow_of_the_head():
    model = tiny(1)
    with torch.no_grad():
        model.head.weight.mul_(1e6).clamp_(-6e4, 6e4)
    with pytest.raises(FloatingPointError, match=r"stage 1, block 2 \(pool and head\)"):
        cpu_engine(model, "fp16").check_finite(images_like(model))


def test_nan_in_the_weights_is_located():
    model = tiny(2)
    with torch.no_grad():
        model.layers[1].blocks[0].mlp.fc1.bias[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"stage 1, block 0 \(mlp\).*check the weights"):
        cpu_engine(model).check_finite(images_like(model))


def test_nan_in_an_image_is_located():
    model = tiny(1)
    images = images_like(model)
    images[1, 2, 5, 7] = float("nan")
    with pytest.raises(FloatingPointError, match=r"stage 0, block 0 \(patch embedding\)"):
        cpu_engine(model).check_finite(images)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_ranges_of_a_healthy_model(version):
    model = tiny(version)
    images = images_like(model)
    ranges = cpu_engine(model).check_finite(images)
    blocks = [(0, 0), (0, 1), (1, 0), (1, 1)]
    halves = [(*b, half) for b in blocks for half in ("attention", "mlp")]
    places = [(r.stage, r.block, r.half) for r in ranges]
    assert places == [
        (0, 0, "patch embedding"), *halves[:4], (0, 2, "patch merging"), *halves[4:],
        (1, 2, "pool and head"),
    ]  # fmt: skip
    with torch.no_grad():
        stages, logits = model.forward_features(images), model(images)
    assert ranges[4].max_abs == pytest.approx(stages[0].abs().max().item(), rel=1e-5)
    assert ranges[-2].max_abs == pytest.approx(stages[1].abs().max().item(), rel=1e-5)
    assert ranges[-1].max_abs == pytest.approx(logits.abs().max().item(), rel=1e-5)


def test_large_but_finite_streams_pass():
    """300 squared passes fp16's range; LayerNorm and scores must not compute there."""
    model = tiny(1)
    with torch.no_grad():
        model.patch_embed.norm.weight.fill_(300.0)
    images = images_like(model)
    engine = cpu_engine(model, "fp16")
    assert engine.check_finite(images)[0].max_abs > 300
    with torch.no_grad():
        expected = model(images)
    assert largest_difference(engine(images), expected) <= 2e-2 * expected.abs().max().item()

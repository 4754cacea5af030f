"""Engine against the readable model, stage by stage, on the reference path and in the kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import (
    cpu_engine,
    images_like,
    largest_difference,
    plan_limits,
    tiny,
)
from swin_references import perturb

from fastswin.engine import Engine
from fastswin.engine.bind import bind
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.models import SwinConfig, SwinTransformer
from fastswin.testing.tolerance import assert_close_to_oracle

TOLERANCE = 1e-5
VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
CPU = torch.device("cpu")

SETTINGS = {
    "default": {},
    "microsoft": {"window_convention": "microsoft"},
    "torchvision": {"window_convention": "torchvision"},
    "torchvision-window-over-map": {"window_convention": "torchvision", "window_size": 8},
    "microsoft-window-over-map": {"window_convention": "microsoft", "window_size": 7},
    "timm-window-over-map": {"window_size": 7},
    "rectangular-window": {"window_size": (3, 5)},
    "head-dim-24": {"embed_dim": 48},
    "no-qkv-bias": {"qkv_bias": False},
    "mlp-ratio-3": {"mlp_ratio": 3.0},
    "no-head": {"num_classes": 0},
    "no-patch-norm": {"patch_norm": False},
    "grey": {"in_channels": 1},
    "one-stage": {"depths": (3,), "num_heads": (2,)},
    "three-stages": {"depths": (2, 2, 2), "num_heads": (2, 4, 8), "window_size": 3},
    "eps": {"layer_norm_eps": 1e-2, "downsample_norm_eps": 3e-2},
    "position-embedding": {"absolute_position_embedding": True},
}


def assert_parity(engine, model, images, tolerance):
    """Logits and every stage in both layouts; the images must differ from each other."""
    with torch.no_grad():
        stages, logits = model.forward_features(images), model(images)
    assert (logits[0] - logits[1]).abs().max() > 1e-2
    assert largest_difference(engine(images), logits) <= tolerance
    nhwc, nchw = engine.features(images, "NHWC"), engine.features(images)
    assert len(nhwc) == len(nchw) == len(stages)
    for ours, channels_first, expected in zip(nhwc, nchw, stages, strict=True):
        assert largest_difference(ours, expected) <= tolerance
        assert torch.equal(channels_first, ours.permute(0, 3, 1, 2))


@VERSIONS
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_reference_path(version, settings):
    model = tiny(version, **settings)
    assert_parity(cpu_engine(model), model, images_like(model), TOLERANCE)


def test_qk_scale():
    model = tiny(1, qk_scale=0.7)
    images = images_like(model)
    assert_parity(cpu_engine(model), model, images, TOLERANCE)
    assert largest_difference(cpu_engine(tiny(1))(images), model(images)) > 1e-3


def test_v2_pretrained_windows():
    model = tiny(2, pretrained_window_sizes=(3, 2))
    assert_parity(cpu_engine(model), model, images_like(model), TOLERANCE)


@VERSIONS
@pytest.mark.parametrize("convention", ["timm", "microsoft", "torchvision"])
@pytest.mark.parametrize("size", [(32, 64), (41, 75), (64, 32)], ids=str)
def test_other_sizes_than_the_configured_one(version, convention, size):
    model = tiny(version, window_convention=convention, absolute_position_embedding=True)
    assert_parity(cpu_engine(model), model, images_like(model, size=size), TOLERANCE)


@VERSIONS
def test_downsample_epsilon_is_used_in_embedding_and_merging(version):
    """Hugging Face keeps 1e-5 there whatever layer_norm_eps says."""
    config = tiny(version).config.replace(layer_norm_eps=1e-5, downsample_norm_eps=0.5)
    model = perturb(SwinTransformer(config))
    same = perturb(SwinTransformer(config.replace(downsample_norm_eps=None)))
    images = images_like(model)
    engine = cpu_engine(model)
    assert_parity(engine, model, images, TOLERANCE)
    features, other = engine.features(images), cpu_engine(same).features(images)
    assert all(largest_difference(a, b) > 1e-2 for a, b in zip(features, other, strict=True))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@VERSIONS
def test_half_precision_is_as_good_as_eager(version, dtype):
    model = tiny(version)
    images = images_like(model, batch=8)
    target = PRECISIONS[dtype].dtype
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).to(target)(images.to(target))
    ours = cpu_engine(model, dtype)(images)
    assert ours.dtype == target
    assert largest_difference(ours, truth) <= 1.5 * largest_difference(eager, truth)


# The kernels in Triton's interpreter: 5x7 and 3x4 maps, four windows with padding and shift.
KERNEL = {"image_size": (18, 26), "window_size": 4, "depths": (2, 1)}

BRANCHES = {
    "fused-qkv-fused-mlp": (
        {"fused_qkv": True, "mlp_channels": 192, "mlp_min_tokens": 0}, "fused", "fused"),
    "fused-qkv-split-mlp": (
        {"fused_qkv": True, "mlp_channels": 192, "mlp_min_tokens": 1 << 40}, "fused", "split"),
    "library": (
        {"fused_qkv": False, "mlp_channels": 0, "mlp_min_tokens": 0}, "library", "library"),
    "library-qkv-fused-mlp": (
        {"fused_qkv": False, "mlp_channels": 192, "mlp_min_tokens": 0}, "library", "fused"),
}  # fmt: skip


@pytest.mark.parametrize("limits", [b[0] for b in BRANCHES.values()], ids=BRANCHES.keys())
@VERSIONS
def test_every_branch_is_planned(version, limits):
    """V2 has no LayerNorm in front of its products: its qkv and few-row MLP are the library's."""
    qkv, mlp = next(b[1:] for b in BRANCHES.values() if b[0] == limits)
    if version == 2:
        qkv, mlp = "library", "fused" if mlp == "fused" else "library"
    with plan_limits(**limits):
        plan = make_plan(
            tiny(version, **KERNEL).config, 2, (18, 26), CPU, PRECISIONS["fp16"], "triton"
        )
    assert [(s.qkv, s.proj, s.mlp) for s in plan.stages] == [(qkv, "library", mlp)] * 2
    assert [s.attention for s in plan.stages] == ["triton"] * 2
    assert [s.merge for s in plan.stages] == ["triton", None]
    assert plan.embed == plan.pool == "triton"


@pytest.mark.parametrize(
    ("version", "branch"),
    [
        (1, "fused-qkv-fused-mlp"),
        (1, "fused-qkv-split-mlp"),
        (1, "library"),
        (2, "library-qkv-fused-mlp"),
        (2, "library"),
    ],
    ids=lambda v: f"v{v}" if isinstance(v, int) else v,
)
def test_kernels_in_half_precision(version, branch):
    """Every branch of the plan against fp32, gated by what eager loses in fp16."""
    model = tiny(version, **KERNEL)
    images = images_like(model)
    limits = BRANCHES[branch][0]
    with torch.no_grad():
        one = images[1:]  # of the pyramid: the interpreter takes seconds for an image
        truth = [*model.forward_features(one), model(images)]
        half = copy.deepcopy(model).half()
        eager = [*half.forward_features(one.half()), half(images.half())]
    with plan_limits(**limits):
        engine = cpu_engine(model, "fp16", impl="triton")
        ours = [*engine.features(one, "NHWC"), engine(images)]
        taken = {(s.qkv, s.mlp) for s in engine.report(2).plan.stages}
    qkv, mlp = BRANCHES[branch][1:]
    assert taken == {(qkv, mlp)}
    for actual, plain, expected in zip(ours, eager, truth, strict=True):
        assert actual.dtype == torch.float16
        bound = 1.5 * largest_difference(plain, expected)
        assert largest_difference(actual, expected) <= bound


@VERSIONS
def test_kernels_in_fp32(version):
    """Deferred biases cross every block, the merging, the pool and the features.

    Beside the fp64 model, as near as the fp32 model is: numbers of size 3 differ by 1e-5 between
    two right orders of the same sums.
    """
    model = tiny(version, **KERNEL)
    images = images_like(model)
    engine = cpu_engine(model, impl="triton")
    assert {s.proj for s in engine.report(2).plan.stages} == {"library"}
    one = images[1:]
    with torch.no_grad():
        eager = [*model.forward_features(one), model(images)]
        exact = copy.deepcopy(model).double()
        truth = [*exact.forward_features(one.double()), exact(images.double())]
    ours = [*engine.features(one, "NHWC"), engine(images)]
    for actual, plain, expected in zip(ours, eager, truth, strict=True):
        assert_close_to_oracle(actual, plain, expected, torch.float32)


def test_kernels_with_other_settings():
    """torchvision's padding of a window over the map, head_dim 24, no qkv bias, grey images."""
    model = tiny(
        1, **{**KERNEL, "depths": (1, 1)}, window_convention="torchvision",
        embed_dim=48, qkv_bias=False, in_channels=1, num_classes=0, patch_norm=False, mlp_ratio=3.0,
        absolute_position_embedding=True,
    )  # fmt: skip
    images = images_like(model, size=(20, 27))
    engine = cpu_engine(model, impl="triton")
    assert engine.report(2, (20, 27)).plan.embed == "triton"
    assert_parity(engine, model, images, TOLERANCE)


def bound(version, *, fused_qkv, mlp_channels, mlp_min_tokens):
    model = tiny(version)
    with plan_limits(fused_qkv=fused_qkv, mlp_channels=mlp_channels, mlp_min_tokens=mlp_min_tokens):
        plan = make_plan(model.config, 2, (34, 50), CPU, PRECISIONS["fp16"], "triton")
    weights = prepare(model, CPU, torch.float32)
    return model, bind(plan, weights, PRECISIONS["fp16"]), weights


def test_offsets_are_the_sums_of_the_biases_left_out():
    model, plan, _ = bound(1, fused_qkv=False, mlp_channels=0, mlp_min_tokens=0)
    blocks = model.layers[1].blocks
    first, second = plan.offsets[1]
    assert first.norm1 is None
    torch.testing.assert_close(first.norm2, blocks[0].attn.proj.bias)
    after = blocks[0].attn.proj.bias + blocks[0].mlp.fc2.bias
    torch.testing.assert_close(second.norm1, after)
    after = after + blocks[1].attn.proj.bias
    torch.testing.assert_close(second.norm2, after)
    torch.testing.assert_close(plan.stage_end[1], after + blocks[1].mlp.fc2.bias)


def test_fused_mlp_settles_the_offset():
    model, plan, _ = bound(1, fused_qkv=True, mlp_channels=192, mlp_min_tokens=0)
    for stage, layer in zip(plan.offsets, model.layers, strict=True):
        for offsets, block in zip(stage, layer.blocks, strict=True):
            assert offsets.norm1 is None
            torch.testing.assert_close(offsets.norm2, block.attn.proj.bias)
    assert plan.stage_end == (None, None)


def test_v2_defers_nothing():
    _, plan, _ = bound(2, fused_qkv=False, mlp_channels=0, mlp_min_tokens=0)
    assert plan.stage_end == (None, None)
    assert all(o.norm1 is None and o.norm2 is None for stage in plan.offsets for o in stage)


def test_plans_share_their_offsets():
    """A captured graph reads them after its plan was dropped: they live as long as the weights."""
    _, first, weights = bound(1, fused_qkv=False, mlp_channels=0, mlp_min_tokens=0)
    second = bind(first.plan, weights, PRECISIONS["fp16"])
    assert second.stage_end[0] is first.stage_end[0]
    assert second.offsets[1][1].norm2 is first.offsets[1][1].norm2


def test_wide_heads_take_the_reference_attention():
    config = SwinConfig(
        image_size=32, embed_dim=160, depths=(1,), num_heads=(1,), window_size=4, num_classes=3
    )
    plan = make_plan(config, 1, (32, 32), CPU, PRECISIONS["fp16"], "triton")
    assert plan.stages[0].attention == "reference"
    assert "head_dim 160" in plan.stages[0].reasons["attention"]


@pytest.mark.parametrize(
    ("changes", "embed"),
    [
        ({}, "triton"),
        ({"patch_size": 16, "image_size": (64, 96)}, "reference"),  # 768 values a patch
        ({"embed_dim": 40, "num_heads": (5, 5)}, "reference"),  # 32 + 8 columns: no dot of 8
    ],
    ids=["usual", "large-patch", "odd-width"],
)
def test_plans_never_pick_a_kernel_that_would_refuse(changes, embed):
    """Any configuration runs: where a kernel has a limit the plan takes the reference."""
    config = SwinConfig(
        **{
            "image_size": (16, 24), "embed_dim": 32, "depths": (1, 1), "num_heads": (1, 2),
            "window_size": (2, 2), "num_classes": 5,
        } | changes
    )  # fmt: skip
    model = SwinTransformer(config).eval()
    images = torch.randn(1, 3, *config.image_size, generator=torch.Generator().manual_seed(3))
    engine = Engine(model, "fp32", device="cpu", impl="triton")
    assert engine.report().plan.embed == embed
    with torch.no_grad():
        torch.testing.assert_close(engine(images), model(images), atol=1e-5, rtol=0)

"""dtype, device and copies: nothing derived may be left behind (SWO-22)."""

from __future__ import annotations

import copy

import pytest
import torch
from swin_references import images_of, logits, our_model
from torch._subclasses.fake_tensor import FakeTensorMode

from fastswin.models import SwinTransformer

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
IMAGE = (64, 64)

#: dtype and the largest difference of fp32 logits of magnitude about 1 it may cause
CASTS = {
    "half": (torch.float16, 2e-2),
    "bfloat16": (torch.bfloat16, 1.5e-1),
    "double": (torch.float64, 1e-5),
}


def small(version):
    return our_model(version, image_size=IMAGE)


@VERSIONS
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_cast_after_construction(version, warm, cast):
    """With ``warm`` every cache has seen fp32 before the cast."""
    dtype, tolerance = cast
    model, images = small(version), images_of(IMAGE)
    expected = logits(small(version), images)
    if warm:
        logits(model, images)
    out = logits(model.to(dtype), images.to(dtype))
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() <= tolerance


@VERSIONS
@pytest.mark.parametrize("first", [torch.float16, torch.float64], ids=str)
def test_fp32_is_exact_after_another_dtype_ran(version, first):
    images = images_of(IMAGE)
    before = logits(small(version), images)
    logits(small(version).to(first), images.to(first))
    assert torch.equal(logits(small(version), images), before)


@VERSIONS
def test_there_and_back(version):
    """half and back to fp32 gives the rounded weights' logits, not a stale table's."""
    images = images_of(IMAGE)
    rounded = small(version)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.half().float())
    model = small(version).half()
    logits(model, images.half())
    assert torch.equal(logits(model.float(), images), logits(rounded, images))


@VERSIONS
def test_meta_then_assign(version):
    images = images_of(IMAGE)
    source = small(version)
    with torch.device("meta"):
        model = SwinTransformer(source.config)
    moved = small(version).to("meta")
    for empty in (model, moved):
        assert all(p.is_meta for p in empty.parameters())
        assert not list(empty.buffers())
        empty.load_state_dict(source.state_dict(), assign=True)
        assert torch.equal(logits(empty.eval(), images), logits(source, images))


@VERSIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_meta_then_assign_of_another_dtype(version, dtype):
    source = small(version).to(dtype)
    model = small(version).to("meta")
    model.load_state_dict(source.state_dict(), assign=True)
    images = images_of(IMAGE).to(dtype)
    assert torch.equal(logits(model, images), logits(source, images))


@VERSIONS
def test_meta_forward_gives_shapes_and_leaves_no_trace(version):
    model, images = small(version), images_of(IMAGE)
    expected = logits(model, images)
    meta = copy.deepcopy(model).to("meta")
    assert logits(meta, images.to("meta")).shape == expected.shape
    assert torch.equal(logits(model, images), expected)


def inference_mode(model, images):
    with torch.inference_mode():
        model(images)


def meta_context(model, images):
    with torch.device("meta"):
        copy.deepcopy(model).to("meta")(images.to("meta"))


def fake_tensors(model, images):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(images)


def double_default(model, images):
    torch.set_default_dtype(torch.float64)
    try:
        copy.deepcopy(model).double()(images.double())
    finally:
        torch.set_default_dtype(torch.float32)


@VERSIONS
@pytest.mark.parametrize(
    "first", [inference_mode, meta_context, fake_tensors, double_default],
    ids=lambda mode: mode.__name__,
)  # fmt: skip
def test_training_works_after_another_mode_ran_first(version, first):
    """Nothing made inside a mode (an index, a mask) may serve a later training step."""
    model, images = small(version), images_of(IMAGE)
    first(model, images)
    model(images).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@VERSIONS
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_deepcopy_is_independent(version, warm):
    model, images = small(version), images_of(IMAGE)
    if warm:
        logits(model, images)
    twin = copy.deepcopy(model)
    expected = logits(model, images)
    assert torch.equal(logits(twin, images), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits(twin, images), expected)


@VERSIONS
def test_weights_changed_in_place_are_seen(version):
    """No cached table: V2's bias follows its MLP, V1's its table."""
    model, images = small(version), images_of(IMAGE)
    before = logits(model, images)
    name = "relative_position_bias_table" if version == 1 else "cpb_mlp.2.weight"
    with torch.no_grad():
        model.get_parameter(f"layers.0.blocks.0.attn.{name}").add_(0.5)
        rows = model.get_parameter(f"layers.0.blocks.0.attn.{name}")
        rows[: len(rows) // 2].neg_()
    assert (logits(model, images) - before).abs().max() > 1e-4


@VERSIONS
def test_logit_scale_is_clamped_by_a_number(version):
    """ln 100, not a tensor on some device: a huge temperature gives the clamped one's logits."""
    model, images = small(version), images_of(IMAGE)
    if version == 1:
        assert not hasattr(model.layers[0].blocks[0].attn, "logit_scale")
        return
    with torch.no_grad():
        seen = []
        for fill in (50.0, 4.7):  # both above ln 100 = 4.605
            for layer in model.layers:
                for block in layer.blocks:
                    block.attn.logit_scale.fill_(fill)
            seen.append(logits(model, images))
    assert torch.equal(*seen)


@VERSIONS
def test_the_state_dict_holds_parameters_only(version):
    model = small(version)
    assert not list(model.buffers())
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}

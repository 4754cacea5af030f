"""What acceleration refuses, and that a refusal changes nothing."""

from __future__ import annotations

import pytest
import torch
from tiny_swins import blocks, build, images, logits, microsoft_model, timm_model
from torch import nn

from fastswin import accelerate, restore
from fastswin.accelerate.block import FusedBlock
from fastswin.accelerate.swap import fused_class


def classes(model):
    return [type(m) for m in model.modules()]


def not_a_swin():
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.GELU())


def other_activation():
    model = timm_model(1, (64, 32))
    for block in blocks(model):
        block.mlp.act = nn.ReLU()
    return model


def mixed_devices():
    model = timm_model(1, (64, 32))
    model.head.to("meta")
    return model


def own_forward():
    model = timm_model(1, (64, 32))
    for block in blocks(model):
        block.forward = block.forward
    return model


REFUSED = {
    "no Swin": (not_a_swin, {}, TypeError, "Sequential has no Swin block"),
    "no module": (lambda: "swin_tiny", {}, TypeError, "model must be a torch.nn.Module"),
    "activation": (other_activation, {}, ValueError, "unsupported activation='ReLU'"),
    "two devices": (mixed_devices, {}, ValueError, "on one device, found cpu, meta"),
    "patched forward": (own_forward, {}, ValueError, "forward is replaced on the instance"),
    "residual_dtype": (
        lambda: timm_model(1, (64, 32)), {"residual_dtype": torch.int8}, ValueError,
        "residual_dtype must be None or one of",
    ),
    "impl": (lambda: timm_model(1, (64, 32)), {"impl": "cuda"}, ValueError, "impl must be one of"),
    "unknown option": (
        lambda: timm_model(1, (64, 32)), {"fuse_mlp": True}, TypeError, "fuse_mlp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong_and_change_nothing(case):
    make, options, error, message = REFUSED[case]
    model = make()
    before = classes(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=message):
        accelerate(model, **options)
    assert before is None or classes(model) == before


def test_a_refused_second_call_leaves_the_first_in_force():
    model = build("timm V1")
    accelerate(model, recompute_gelu=False)
    x = images("timm V1")
    expected = logits(model, x)
    for block in blocks(model):
        block.mlp.act = nn.ReLU()
    with pytest.raises(ValueError, match="activation"):
        accelerate(model)
    for block in blocks(model):
        assert type(block).__name__ == "FusedSwinTransformerBlock"
        assert block._fastswin.recompute_gelu is False
        block.mlp.act = nn.GELU()
    assert torch.equal(logits(model, x), expected)


def test_restore_takes_modules_only():
    with pytest.raises(TypeError, match="model must be a"):
        restore("swin_tiny")


WRONG_IMAGES = {
    "no batch": torch.zeros(3, 64, 48),
    "channels last": torch.zeros(2, 64, 48, 3),
    "one channel": torch.zeros(2, 1, 64, 48),
    "integers": torch.zeros(2, 3, 64, 48, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", WRONG_IMAGES)
def test_images_of_the_wrong_kind(name):
    model = build("torchvision V1")
    accelerate(model)
    expected = TypeError if name == "integers" else ValueError
    with pytest.raises(expected, match="images must be"):
        model(WRONG_IMAGES[name])


@pytest.mark.parametrize("case", ["timm V1", "transformers V1", "microsoft V2"])
def test_block_input_of_the_wrong_rank(case):
    model = build(case)
    accelerate(model)
    block = blocks(model)[0]
    extra = ((8, 8),) if case == "transformers V1" else ()
    with pytest.raises(ValueError, match="x must be"):
        block(torch.zeros(24), *extra)


def test_a_subclass_with_its_own_forward_is_kept():
    from timm.models.swin_transformer import SwinTransformerBlock

    class Gated(SwinTransformerBlock):
        def forward(self, x):
            return 0.5 * super().forward(x)

    class Tagged(SwinTransformerBlock):
        tag = "same forward"

    model, x = build("timm V1").eval(), images("timm V1")
    first, second, *_ = blocks(model)
    first.__class__, second.__class__ = Gated, Tagged
    expected = logits(model, x)
    report = accelerate(model)
    assert [(k.name, k.reason) for k in report.kept] == [
        ("layers.0.blocks.0", "Gated replaces SwinTransformerBlock.forward")
    ]
    assert isinstance(second, Tagged)
    assert type(second) is not Tagged
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    assert "kept layers.0.blocks.0 (Gated): Gated replaces" in str(report)


def test_strangers_are_asked_for_their_answer():
    """Blocks told by attributes: one that scales its residual, one that wants more than tokens."""
    model = microsoft_model(1, (64, 32))
    first, second, third, _ = blocks(model)

    class Scaled(type(first)):
        def forward(self, x):
            return x + 0.5 * (super().forward(x) - x)

    class Masked(type(first)):
        def forward(self, x, mask_matrix):
            return super().forward(x)

    first.__class__, second.__class__ = Scaled, Masked
    before = [m.training for m in model.modules()]
    report = accelerate(model)
    reasons = {k.name: k.reason for k in report.kept}
    assert set(reasons) == {"layers.0.blocks.0", "layers.0.blocks.1"}
    assert "its answer differs from a Swin block's" in reasons["layers.0.blocks.0"]
    assert reasons["layers.0.blocks.1"].startswith("its forward takes x, mask_matrix")
    assert type(third).__name__ == "FusedMsBlock"
    assert [m.training for m in model.modules()] == before


def test_part_of_a_larger_model():
    backbone = build("timm V1")
    detector = nn.ModuleDict({"backbone": backbone, "neck": nn.Conv2d(48, 8, 1)})
    report = accelerate(detector)
    assert {s.name.split(".")[0] for s in report.swapped} == {"backbone"}
    assert sum(s.framework == "timm" for s in report.swapped) == 4 + 1  # blocks and merging
    assert type(detector["neck"]) is nn.Conv2d


def test_a_mixin_without_all_of_its_methods_makes_no_class():
    class Half(FusedBlock):
        def _fastswin_attend(self, x, shift_size):
            return x, None

    with pytest.raises(TypeError, match="Half lacks _fastswin_drop_paths"):
        fused_class(Half, nn.Identity)

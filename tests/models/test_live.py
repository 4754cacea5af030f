"""Reading live models: what is refused by name, and what a copy means."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from swin_references import KIND_IDS, KINDS, build, images_of, logits, our_model, reference
from torch import nn

from fastswin.models import SwinConfig, config_of, from_live, official_state


def timm_model(name, **arguments):
    import timm

    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def timm_with_other_activation():
    model = build("timm", 1)
    model.layers[0].blocks[0].mlp.act = nn.GELU(approximate="tanh")
    return model


def timm_with_other_pooling():
    model = build("timm", 1)
    model.reset_classifier(7, "max")
    return model


def mixed_torchvision():
    from torchvision.models.swin_transformer import SwinTransformerBlockV2

    return build("torchvision", 1, block=SwinTransformerBlockV2)


def different_scales():
    model = build("timm", 1)
    model.layers[0].blocks[0].attn.scale = 0.5
    return model


REFUSED = {
    "timm-always_partition": (
        lambda: build("timm", 1, always_partition=True), "unsupported always_partition=True"),
    "timm-head_dim": (lambda: build("timm", 1, head_dim=6), "unsupported head_dim=12"),
    "timm-global_pool": (timm_with_other_pooling, "unsupported global_pool='max'"),
    "timm-activation": (timm_with_other_activation, "unsupported activation='GELU'"),
    "timm-v2-act_layer": (
        lambda: build("timm", 2, act_layer="relu"), "unsupported activation='ReLU'"),
    "timm-mlp_ratio-per-stage": (
        lambda: build("timm", 1, mlp_ratio=(4.0, 3.0)), "mlp_ratio must be the same"),
    "timm-window-per-stage": (
        lambda: build("timm", 1, window=((2, 2), (4, 4))), "window_size per stage: stage 0"),
    "timm-s3": (lambda: timm_model("swin_s3_tiny_224"), "window_size per stage: stage 0"),
    "timm-qk_scale-per-block": (different_scales, "qk_scale must be the same in all layers"),
    "timm-rectangular-patch": (
        lambda: build("timm", 1, patch_size=(4, 2)), "unsupported patch_size="),
    "torchvision-mixed-versions": (
        mixed_torchvision, "unsupported downsample_layer='PatchMerging'"),
    "huggingface-v1-hidden_act": (
        lambda: build("huggingface", 1, hidden_act="relu"), "unsupported hidden_act='relu'"),
    "huggingface-v2-hidden_act": (
        lambda: build("huggingface", 2, hidden_act="gelu_new"), "unsupported hidden_act="),
    "huggingface-v2-absolute": (
        lambda: build("huggingface", 2, use_absolute_embeddings=True),
        "unsupported use_absolute_embeddings=True"),
    "huggingface-v1-small-image": (
        lambda: build("huggingface", 1, image=(16, 16)), r"unsupported image_size=\(16, 16\)"),
    "huggingface-v2-floored-maps": (
        lambda: build("huggingface", 2, image=(28, 28)), "window_size per stage: stage 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_settings_are_refused_by_name(case):
    make, message = case
    with pytest.raises(ValueError, match=message) as refused:
        from_live(make())
    assert "\n" not in str(refused.value)


def subclass_with_its_own_forward():
    from timm.models.swin_transformer import SwinTransformer

    class Tuned(SwinTransformer):
        def forward_features(self, x):
            return super().forward_features(x) * 2

    return Tuned(img_size=32, embed_dim=24, depths=(1, 1), num_heads=(2, 4), window_size=4)


def swinv2_backbone():
    import transformers

    return transformers.Swinv2Backbone(
        transformers.Swinv2Config(image_size=64, embed_dim=24, depths=[1, 1], num_heads=[2, 4])
    )


NOT_A_SWIN = {
    "linear": lambda: nn.Linear(2, 2),
    "vit": lambda: timm_model("vit_tiny_patch16_224"),
    "swinv2_cr": lambda: timm_model("swinv2_cr_tiny_224"),
    "features_only": lambda: timm_model("swin_tiny_patch4_window7_224", features_only=True),
    "backbone": swinv2_backbone,
    "sequential": lambda: nn.Sequential(our_model(1)),
}


@pytest.mark.parametrize("make", NOT_A_SWIN.values(), ids=NOT_A_SWIN.keys())
@pytest.mark.parametrize("function", [from_live, config_of, official_state])
def test_no_swin(make, function):
    with pytest.raises(
        TypeError, match=r"is not a Swin model; accepted: fastswin .*timm .*torchvi"
    ):
        function(make())


def test_replaced_forward_is_refused():
    with pytest.raises(TypeError, match=r"Tuned replaces SwinTransformer.forward_features"):
        from_live(subclass_with_its_own_forward())


def test_no_module():
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got dict"):
        from_live({})


@pytest.mark.parametrize(("framework", "version"), [*KINDS, ("ours", 1), ("ours", 2)],
                         ids=[*KIND_IDS, "ours-v1", "ours-v2"])  # fmt: skip
def test_a_copy_shares_nothing(framework, version):
    theirs = our_model(version) if framework == "ours" else build(framework, version)
    ours = from_live(theirs)
    before = logits(ours, images_of())
    memory = {p.untyped_storage().data_ptr() for p in theirs.parameters()}
    assert not memory & {p.untyped_storage().data_ptr() for p in ours.parameters()}
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.zero_()
    assert torch.equal(logits(ours, images_of()), before)
    assert not ours.training
    assert all(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_official_state_follows_the_module(framework, version):
    """The cheap way to read weights again after they changed."""
    theirs = build(framework, version)
    ours = from_live(theirs)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.01)
    state = official_state(theirs)
    assert state.keys() == ours.state_dict().keys()
    assert not any(t.requires_grad for t in state.values())
    ours.load_state_dict(state)
    expected = logits(theirs, images_of())
    assert (logits(ours, images_of()) - expected).abs().max() <= 2e-5


def test_official_state_copies_only_what_is_fused():
    theirs = build("timm", 2)
    memory = {p.untyped_storage().data_ptr() for p in theirs.parameters()}
    assert {t.untyped_storage().data_ptr() for t in official_state(theirs).values()} <= memory


def test_extra_parameters_are_refused():
    model = build("timm", 1)
    model.layers[0].blocks[0].gamma = nn.Parameter(torch.ones(24))
    with pytest.raises(ValueError, match=r"1 unexpected \(layers.0.blocks.0.gamma\)"):
        from_live(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype_follows_the_module(dtype):
    ours = from_live(build("torchvision", 2).to(dtype))
    assert {p.dtype for p in ours.parameters()} == {dtype}


WRAPPERS = {
    "data-parallel": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "both": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_wrappers_are_looked_through(wrap):
    theirs = reference("timm", 1)
    assert torch.equal(logits(from_live(wrap(theirs)), images_of()), logits(theirs, images_of()))


def test_training_mode_of_the_source_is_left_alone():
    theirs = build("timm", 1).train()
    from_live(theirs)
    assert theirs.training


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_hugging_face_bare_model(version):
    import transformers

    classifier = reference("huggingface", version)
    bare = classifier.swin if version == 1 else classifier.swinv2
    assert isinstance(bare, (transformers.SwinModel, transformers.Swinv2Model))
    ours = from_live(bare)
    assert ours.config.num_classes == 0
    with torch.no_grad():
        expected = bare(images_of()).pooler_output
    assert (logits(ours, images_of()) - expected).abs().max() <= 1e-5


def test_hugging_face_window_after_a_small_image():
    """transformers shrinks an attribute for good once it saw a small map; the config is read."""
    theirs = build("huggingface", 1, image=(32, 32))
    logits(theirs, images_of((32, 32)))
    assert from_live(theirs).config.window_size == (4, 4)


def test_timm_after_set_input_size():
    theirs = build("timm", 1)
    theirs.set_input_size(img_size=(128, 64), window_size=(8, 4))
    ours = from_live(theirs)
    assert (ours.config.image_size, ours.config.window_size) == ((128, 64), (8, 4))
    difference = logits(ours, images_of((128, 64))) - logits(theirs, images_of((128, 64)))
    assert difference.abs().max() <= 1e-5


def test_timm_head_dropout_is_reported(caplog):
    config_of(build("timm", 1, drop_rate=0.3))
    assert "drop_rate=0.3 before timm's head is left out" in caplog.text


def test_ours_keeps_its_config():
    model = our_model(2, layer_norm_eps=1e-3, window_convention="torchvision")
    assert config_of(model) is model.config
    assert isinstance(model.config, SwinConfig)


def test_no_framework_is_imported():
    code = (
        "import sys, torch, fastswin.models as m\n"
        "c = m.SwinConfig(image_size=32, embed_dim=8, depths=(1,), num_heads=(1,))\n"
        "model = m.from_live(m.SwinTransformer(c))\n"
        "m.load_checkpoint(dict(model.state_dict()))\n"
        "try: m.from_live(torch.nn.Linear(2, 2))\n"
        "except TypeError: pass\n"
        "print([n for n in ('timm', 'torchvision', 'transformers') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

"""Settings that must be honoured (SWO-20): each changes our logits as the reference's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from swin_references import build, images_of, logits, reference
from torch import nn

from fastswin.models import config_of, from_live, load_checkpoint

EPS = 0.05  # far above 1e-5, so that a loader that ignores it is seen


def torchvision_eps(version):
    return build("torchvision", version, norm_layer=partial(nn.LayerNorm, eps=EPS))


def timm_scale(version):
    """timm has no qk_scale argument; users set the attribute."""
    model = build("timm", version)
    for layer in model.layers:
        for block in layer.blocks:
            block.attn.scale = 0.5
    return model


def huggingface_scale(version):
    model = build("huggingface", version)
    for layer in model.swin.encoder.layers:
        for block in layer.blocks:
            block.attention.scaling = 0.5
    return model


#: id: (builder, framework of the default it must differ from, version, our attribute, value)
SETTINGS = {
    "timm-v1-qk_scale": (timm_scale, "timm", 1, "qk_scale", 0.5),
    "huggingface-v1-qk_scale": (huggingface_scale, "huggingface", 1, "qk_scale", 0.5),
    "microsoft-v1-qk_scale": (
        partial(build, "microsoft", qk_scale=0.5), "microsoft", 1, "qk_scale", 0.5,
    ),
    "microsoft-v1-absolute": (
        partial(build, "microsoft", ape=True), "microsoft", 1,
        "absolute_position_embedding", True,
    ),
    "microsoft-v2-absolute": (
        partial(build, "microsoft", ape=True), "microsoft", 2,
        "absolute_position_embedding", True,
    ),
    "microsoft-v1-patch_norm": (
        partial(build, "microsoft", patch_norm=False), "microsoft", 1, "patch_norm", False,
    ),
    "huggingface-v1-absolute": (
        partial(build, "huggingface", use_absolute_embeddings=True), "huggingface", 1,
        "absolute_position_embedding", True,
    ),
}  # fmt: skip
for _version in (1, 2):
    SETTINGS |= {
        f"timm-v{_version}-eps": (
            partial(build, "timm", norm_layer=partial(nn.LayerNorm, eps=EPS)),
            "timm", _version, "layer_norm_eps", EPS,
        ),
        f"torchvision-v{_version}-eps": (
            torchvision_eps, "torchvision", _version, "layer_norm_eps", EPS,
        ),
        f"huggingface-v{_version}-eps": (
            partial(build, "huggingface", layer_norm_eps=EPS),
            "huggingface", _version, "layer_norm_eps", EPS,
        ),
    }  # fmt: skip
    for _framework in ("timm", "huggingface", "microsoft"):
        SETTINGS[f"{_framework}-v{_version}-no_qkv_bias"] = (
            partial(build, _framework, qkv_bias=False), _framework, _version, "qkv_bias", False,
        )  # fmt: skip
    for _framework in ("timm", "torchvision", "huggingface", "microsoft"):
        SETTINGS[f"{_framework}-v{_version}-mlp_ratio"] = (
            partial(build, _framework, mlp_ratio=3.0), _framework, _version, "mlp_ratio", 3.0,
        )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_setting_is_read_and_matters(setting):
    make, framework, version, attribute, value = setting
    theirs = make(version=version) if isinstance(make, partial) else make(version)
    ours = from_live(theirs)
    assert getattr(ours.config, attribute) == value
    assert getattr(config_of(reference(framework, version)), attribute) != value
    expected = logits(theirs, images_of())
    assert (logits(ours, images_of()) - expected).abs().max() <= 1e-5
    # taken back to the default, our model no longer agrees: the setting is what made it agree
    changes = {attribute: getattr(config_of(reference(framework, version)), attribute)}
    if attribute not in ("layer_norm_eps", "qk_scale"):
        return
    if attribute == "layer_norm_eps":
        changes["downsample_norm_eps"] = None
    default = type(ours)(ours.config.replace(**changes))
    default.load_state_dict(ours.state_dict())
    assert (logits(default.eval(), images_of()) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_hugging_face_keeps_1e_5_around_resolution_changes(version):
    ours = from_live(build("huggingface", version, layer_norm_eps=EPS))
    assert ours.config.downsample_norm_eps == 1e-5
    assert ours.patch_embed.norm.eps == ours.layers[0].downsample.norm.eps == 1e-5
    assert ours.norm.eps == ours.layers[0].blocks[0].norm1.eps == EPS


DROPOUTS = {
    "timm": (
        {"proj_drop_rate": 0.2, "attn_drop_rate": 0.1, "drop_path_rate": 0.3}, (0.2, 0.1, 0.3),
    ),
    "torchvision": (
        {"dropout": 0.2, "attention_dropout": 0.1, "stochastic_depth_prob": 0.3}, (0.2, 0.1, 0.3),
    ),
    "huggingface": (
        {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1, "drop_path_rate": 0.3},
        (0.2, 0.1, 0.3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("framework", DROPOUTS)
def test_dropouts_are_read(framework, version):
    arguments, rates = DROPOUTS[framework]
    config = config_of(build(framework, version, **arguments))
    read = (config.drop_rate, config.attn_drop_rate, config.drop_path_rate)
    assert read == pytest.approx(rates)


def four_routes(version):
    """One model as Hugging Face (old and current names), official and torchvision dicts."""
    from fastswin.models.checkpoint import huggingface, torchvision

    model = from_live(reference("timm", version))
    state, config = model.state_dict(), model.config
    routes = {
        "huggingface-old": huggingface.from_official(state, config, generation="old"),
        "huggingface-current": huggingface.from_official(state, config),
        "official": dict(state),
        "torchvision": torchvision.from_official(state, config),
    }
    if version == 2:
        for name, tensor in routes["torchvision"].items():
            if name.endswith("attn.qkv.bias"):
                third = len(tensor) // 3
                tensor[third : 2 * third] = 7.0
    return config, routes


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_four_routes_give_the_same_logits(version):
    config, routes = four_routes(version)
    expected = logits(reference("timm", version), images_of())
    for route, state in routes.items():
        loaded = load_checkpoint(state, config=config)
        assert loaded.report.layout == route.split("-")[0].replace("official", "microsoft")
        assert (logits(loaded.model, images_of()) - expected).abs().max() <= 1e-5, route


def test_v2_key_bias_is_not_harmless():
    """Why the middle third is ignored: cosine attention is not invariant to a key bias."""
    model = from_live(reference("torchvision", 2))
    attention = model.layers[0].blocks[0].attn
    with torch.no_grad():
        assert attention.qkv_bias[24:48].abs().max() == 0
        assert attention.qkv_bias[:24].abs().max() > 0.01

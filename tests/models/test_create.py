"""Named models, with and without a hub."""

from __future__ import annotations

import sys

import pytest
import torch
from swin_references import images_of, logits, our_model, perturb

from fastswin.models import create_model, find_variant, list_models

TINY = "swin_tiny_patch4_window7_224"


@pytest.fixture
def hub(monkeypatch):
    """timm's hub replaced by a local random model; records what was asked for."""
    import timm

    asked = []
    original = timm.create_model

    def create(name, pretrained=False, **arguments):
        asked.append((name, pretrained, arguments))
        if ".ms_in22k" in name and "ft" not in name:
            arguments.setdefault("num_classes", 50)
        asked.append(perturb(original(name.partition(".")[0], **arguments)))
        return asked[-1]

    monkeypatch.setattr(timm, "create_model", create)
    return asked


def test_random_model():
    model = create_model(TINY, num_classes=5, embed_dim=24, num_heads=(1, 2, 4, 8))
    assert model.config == find_variant(TINY).replace(
        num_classes=5, embed_dim=24, num_heads=(1, 2, 4, 8)
    )
    assert model.training


def test_pretrained_weights_come_through_timm(hub):
    model = create_model(TINY, pretrained=True)
    (name, pretrained, arguments), theirs = hub
    assert (name, pretrained, arguments) == (TINY, True, {})
    assert model.config == find_variant(TINY)
    assert not model.training
    images = images_of((224, 224), 1)
    assert (logits(model, images) - logits(theirs, images)).abs().max() <= 1e-5


def test_pretrained_tag_decides_the_classes(hub):
    name = TINY + ".ms_in22k"
    model = create_model(name, pretrained=True)
    assert hub[0][0] == name
    assert model.config.num_classes == 50


def test_pretrained_overrides_reach_timm(hub):
    model = create_model(TINY, pretrained=True, num_classes=3, image_size=256, window_size=8,
                         drop_path_rate=0.2)  # fmt: skip
    assert hub[0][2] == {"num_classes": 3, "img_size": (256, 256), "window_size": (8, 8)}
    assert model.config.window_size == (8, 8)
    assert model.config.drop_path_rate == 0.2
    assert model.head.weight.shape == (3, 768)


def test_pretrained_weights_of_another_shape_are_refused(hub):
    with pytest.raises(ValueError, match=r"\['mlp_ratio'\] change the shape of the pretrained"):
        create_model(TINY, pretrained=True, mlp_ratio=3.0)
    assert len(hub) == 2


def test_timm_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(RuntimeError, match=r"pip install 'fastswin\[timm\]'"):
        create_model(TINY, pretrained=True)
    assert create_model(TINY, embed_dim=24, num_heads=(1, 1, 1, 1)).config.embed_dim == 24


def test_network_missing(monkeypatch):
    import timm

    def fails(*_, **__):
        raise ConnectionError("name resolution failed\nmore lines")

    monkeypatch.setattr(timm, "create_model", fails)
    with pytest.raises(RuntimeError, match=r"\(name resolution failed\); check the network") as e:
        create_model(TINY, pretrained=True)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [({"name": "swin_tinny"}, ValueError, "unknown model name.*nearest"),
     ({"name": TINY, "depth": 3}, TypeError, "depth"),
     ({"name": TINY, "num_heads": (5, 5, 5, 5)}, ValueError, r"num_heads\[0\]=5 must divide")],
    ids=["name", "attribute", "value"],
)  # fmt: skip
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        create_model(**arguments)


# --- every named variant ---------------------------------------------------------------------


def timm_name(name):
    import timm

    return name if name in timm.list_models() else None


@pytest.mark.parametrize("name", list_models())
def test_variant_has_timms_parameter_count(name):
    """Built on the meta device: no memory, no initial values."""
    import timm

    with torch.device("meta"):
        ours = create_model(name)
        assert all(p.is_meta for p in ours.parameters())
        theirs = timm.create_model(timm_name(name)) if timm_name(name) else None
    count = sum(p.numel() for p in ours.parameters())
    if theirs is not None:
        assert count == sum(p.numel() for p in theirs.parameters())
    else:  # timm lacks the 24-channel heads: as Swin-T but for heads and window
        tiny = sum(p.numel() for p in create_model(TINY).parameters())
        assert name == "swin_tiny_c24_patch4_window8_256"
        heads = sum(d * h for d, h in zip((2, 2, 6, 2), (4, 8, 16, 32), strict=True))
        assert count - tiny == 225 * heads - 169 * heads * 3 // 4


def test_variants_match_timms_settings():
    import timm

    for name in ("swinv2_base_window12to24_192to384", "swin_large_patch4_window12_384"):
        from fastswin.models import config_of

        with torch.device("meta"):
            theirs = config_of(timm.create_model(name, drop_path_rate=0.0))
        assert theirs == find_variant(name)


def test_small_model_is_what_it_says():
    assert sum(p.numel() for p in our_model(1).parameters()) < 120_000

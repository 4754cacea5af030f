"""fp32 logits of our model against timm, torchvision, transformers and Microsoft's definition."""

from __future__ import annotations

import pytest
import torch
from swin_references import IMAGE, KIND_IDS, KINDS, build, images_of, logits, perturb, reference

from fastswin.models import config_of, from_live, load_checkpoint

TOLERANCE = 1e-5


def difference(ours, theirs, images):
    """Largest difference of logits whose images differ from each other."""
    expected = logits(theirs, images)
    assert (expected[0] - expected[1]).abs().max() > 1e-2
    return (logits(ours, images) - expected).abs().max().item()


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_from_live_gives_the_frameworks_logits(framework, version):
    theirs = reference(framework, version)
    assert difference(from_live(theirs), theirs, images_of()) <= TOLERANCE


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_state_dict_gives_the_frameworks_logits(framework, version):
    theirs = reference(framework, version)
    # V2 without its coordinate tables does not tell its window
    told = version == 1 or framework in ("torchvision", "microsoft")
    config = None if told else config_of(theirs)
    loaded = load_checkpoint(dict(theirs.state_dict()), config=config)
    assert loaded.report.layout == framework
    assert loaded.report.config_from == ("inferred" if told else "config")
    assert loaded.report.coverage == 1.0
    assert difference(loaded.model, theirs, images_of()) <= TOLERANCE


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("framework", ["timm", "torchvision"])
def test_rectangular_windows(framework, version):
    theirs = build(framework, version, image=(64, 96), window=(4, 6))
    ours = from_live(theirs)
    assert ours.config.window_size == (4, 6)
    assert difference(ours, theirs, images_of()) <= TOLERANCE


@pytest.mark.parametrize("framework", ["timm", "huggingface", "microsoft"])
def test_v2_with_pretrained_windows(framework):
    theirs = build(framework, 2, pretrained_window_sizes=(3, 2))
    ours = from_live(theirs)
    assert ours.config.pretrained_window_sizes == (3, 2)
    assert difference(ours, theirs, images_of()) <= TOLERANCE
    assert difference(from_live(build(framework, 2)), theirs, images_of()) > 1e-3


def tiny_timm(version):
    import timm

    name = "swin_tiny_patch4_window7_224" if version == 1 else "swinv2_tiny_window8_256"
    return timm.create_model(name, num_classes=20)


def tiny_torchvision(version):
    import torchvision

    return getattr(torchvision.models, "swin_t" if version == 1 else "swin_v2_t")(num_classes=20)


def tiny_huggingface(version):
    import transformers as hf

    if version == 1:
        return hf.SwinForImageClassification(hf.SwinConfig(num_labels=20))
    return hf.Swinv2ForImageClassification(
        hf.Swinv2Config(image_size=256, window_size=8, num_labels=20)
    )


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    "make", [tiny_timm, tiny_torchvision, tiny_huggingface], ids=lambda f: f.__name__
)
def test_tiny_model_of_full_size(make, version):
    theirs = perturb(make(version), seed=version)
    side = 224 if version == 1 else 256
    assert difference(from_live(theirs), theirs, images_of((side, side), 2)) <= TOLERANCE


def test_images_are_not_square():
    assert IMAGE[0] != IMAGE[1]


def test_gradients_match_the_frameworks():
    theirs = build("timm", 1)
    ours = from_live(theirs)
    upstream = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    for model in (ours, theirs):
        (model(images_of()) * upstream).sum().backward()
    table = "layers.{}.blocks.1.attn.relative_position_bias_table"
    for stage in (0, 1):
        expected = theirs.get_parameter(table.format(stage)).grad
        actual = ours.get_parameter(table.format(stage)).grad
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)

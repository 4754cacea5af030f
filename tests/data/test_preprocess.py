"""Normalisation, its storage in checkpoints, and files that appear whole or not at all."""

import json

import pytest
import torch

from fastswin.data.atomic import replacing, write_text
from fastswin.data.preprocess import Preprocess, from_metadata, metadata_for
from fastswin.models import SwinConfig


def test_normalise_is_the_formula():
    preprocess = Preprocess(image_size=(2, 3), mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))
    pixels = torch.arange(36, dtype=torch.uint8).view(2, 3, 2, 3) * 7
    expected = pixels.double() / 255
    for channel, (mean, std) in enumerate(zip(preprocess.mean, preprocess.std, strict=True)):
        expected[:, channel] = (expected[:, channel] - mean) / std
    got = preprocess.normalise(pixels)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0)


def test_grey_takes_images_without_a_channel_axis():
    preprocess = Preprocess(image_size=(2, 3), mean=(0.25,), std=(0.5,))
    pixels = torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    got = preprocess.normalise(pixels)
    torch.testing.assert_close(got, ((pixels.float() / 255 - 0.25) / 0.5)[:, None])


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 1, 4, 4), (4, 4)], ids=str)
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="pixels must be"):
        Preprocess().normalise(torch.zeros(shape, dtype=torch.uint8))


def test_float_pixels_are_refused():
    with pytest.raises(TypeError, match="uint8"):
        Preprocess().normalise(torch.zeros(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"image_size": (0, 4)}, "image_size"),
        ({"mean": (0.1, 0.2), "std": (1.0, 1.0)}, "mean"),
        ({"std": (1.0,)}, "std"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"crop_ratio": 1.5}, "crop_ratio"),
        ({"interpolation": "nearest"}, "interpolation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_illegal_values_are_named(changes, name):
    with pytest.raises(ValueError, match=name):
        Preprocess(**changes)


def test_metadata_round_trip_through_json():
    preprocess = Preprocess(image_size=(28, 28), mean=(0.3,), std=(0.4,), crop_ratio=1.0)
    stored = json.loads(json.dumps(metadata_for(preprocess, ["a", "b"])))
    assert from_metadata(stored) == (preprocess, ["a", "b"])
    assert from_metadata({}) == (None, None)


@pytest.mark.parametrize(
    "metadata",
    [
        {"fastswin_preprocess": {"size": 3}},
        {"fastswin_preprocess": "text"},
        {"fastswin_preprocess": {"crop_ratio": 7}},
        {"fastswin_classes": "cat"},
    ],
    ids=["unknown-key", "text", "illegal", "classes-text"],
)
def test_malformed_metadata_is_refused(metadata):
    with pytest.raises(ValueError, match=r"fastswin_|crop_ratio"):
        from_metadata(metadata)


@pytest.mark.parametrize(("side", "ratio"), [(224, 0.9), (256, 0.9), (384, 1.0)])
def test_defaults_follow_timm(side, ratio):
    import timm

    name = {224: "swin_tiny_patch4_window7_224", 256: "swinv2_tiny_window8_256",
            384: "swin_base_patch4_window12_384"}[side]  # fmt: skip
    published = timm.models.get_pretrained_cfg(name)
    ours = Preprocess.for_config(SwinConfig(image_size=side))
    assert ours.crop_ratio == ratio == published.crop_pct
    assert (ours.mean, ours.std) == (published.mean, published.std)
    assert ours.interpolation == published.interpolation


def test_two_channels_cannot_be_a_photo():
    with pytest.raises(ValueError, match="in_channels"):
        Preprocess.for_config(SwinConfig(in_channels=2))


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    write_text(path, "old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_write_replaces_and_is_readable_by_others(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o400
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]

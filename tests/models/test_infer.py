"""The configuration that names and shapes tell."""

from __future__ import annotations

import pytest
import torch
from swin_references import KIND_IDS, KINDS, build, our_model, reference

from fastswin.models import CheckpointError, SwinConfig, config_of, load_checkpoint
from fastswin.models.checkpoint import infer_config
from fastswin.models.checkpoint.windows import (
    attention_window,
    coords_pretrained_window,
    coords_window,
    index_window,
    square_window,
)
from fastswin.models.position_bias import log_spaced_coords
from fastswin.ops.window_attention.geometry import relative_position_index

READ = ("version", "patch_size", "in_channels", "num_classes", "embed_dim", "depths", "num_heads",
        "window_size", "mlp_ratio", "qkv_bias", "patch_norm", "absolute_position_embedding",
        "pretrained_window_sizes", "window_convention")  # fmt: skip


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_everything_with_a_shape_is_read(framework, version):
    model = reference(framework, version)
    expected = config_of(model)
    if version == 2 and framework in ("timm", "huggingface"):
        with pytest.raises(
            CheckpointError, match=r"window size of this V2 checkpoint .*model_name="
        ):
            load_checkpoint(dict(model.state_dict()))
        return
    config = load_checkpoint(dict(model.state_dict())).model.config
    assert {n: getattr(config, n) for n in READ} == {n: getattr(expected, n) for n in READ}


UNUSUAL = {
    "classes": {"num_classes": 0},
    "mlp_ratio": {"mlp_ratio": 3.0},
    "no-qkv-bias": {"qkv_bias": False},
    "no-patch-norm": {"patch_norm": False},
    "patch-2": {"patch_size": 2},
    "gray": {"in_channels": 1},
    "one-stage": {"depths": (3,), "num_heads": (2,)},
    "three-stages": {"depths": (1, 2, 1), "num_heads": (1, 2, 4)},
}


@pytest.mark.parametrize("changes", UNUSUAL.values(), ids=UNUSUAL.keys())
def test_unusual_models(changes):
    model = our_model(1, **changes)
    config = load_checkpoint(dict(model.state_dict())).model.config
    for name in READ[:-1]:
        assert getattr(config, name) == getattr(model.config, name), name


def test_image_size_without_any_hint():
    """patch * 2**(stages - 1) * window: the smallest image whose last map is one window."""
    config = load_checkpoint(dict(our_model(1).state_dict())).model.config
    assert config.image_size == (4 * 2 * 4,) * 2
    config = load_checkpoint(dict(reference("torchvision", 2).state_dict())).model.config
    assert config.image_size == (32, 32)


def test_image_size_from_shrunk_windows():
    """Window 12 at 224 px: the last map is 7x7, so is its window (169 rows against 529)."""
    sizes = {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
    model = our_model(1, image_size=(224, 224), window_size=12, **sizes)
    config = load_checkpoint(dict(model.state_dict())).model.config
    assert config.window_size == (12, 12)
    assert config.image_size == (224, 224)
    assert config.stage_window(3) == (7, 7)


def test_image_size_from_an_odd_map():
    """Maps 28, 14, 7, 4 of a 112 px image: no multiple of 4 * 8 has stages 7, 7, 7, 4."""
    sizes = {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
    model = our_model(1, image_size=(112, 112), window_size=7, **sizes)
    config = load_checkpoint(dict(model.state_dict())).model.config
    assert [config.stage_window(s)[0] for s in range(4)] == [7, 7, 7, 4]


def test_image_size_from_position_embeddings():
    model = build("microsoft", 1, image=(96, 96), ape=True)
    assert load_checkpoint(dict(model.state_dict())).model.config.image_size == (96, 96)
    model = build("microsoft", 1, ape=True)
    with pytest.raises(CheckpointError, match=r"384 tokens, which is no square map; pass config="):
        load_checkpoint(dict(model.state_dict()))


@pytest.mark.parametrize("pretrained", [(0, 0), (3, 2), (12, 6)])
def test_v2_pretrained_windows_from_coordinate_tables(pretrained):
    model = build("microsoft", 2, pretrained_window_sizes=pretrained)
    config = load_checkpoint(dict(model.state_dict())).model.config
    assert config.window_size == (4, 4)
    assert config.pretrained_window_sizes == (pretrained if any(pretrained) else None)


@pytest.mark.parametrize(
    "window", [(4, 6), (2, 14), (1, 5), (7, 1), (1, 1), (8, 12), (7, 7)], ids=str
)
def test_window_from_its_index(window):
    index = relative_position_index(window)
    found = index_window(index)
    if 1 in window:  # both orientations of a one-token side have the same index
        assert sorted(found) == sorted(window)
    else:
        assert found == index_window(index.flatten()) == window


@pytest.mark.parametrize("window", [(4, 6), (8, 8), (1, 3)], ids=str)
@pytest.mark.parametrize("pretrained", [0, 6, 12])
def test_window_from_coordinates(window, pretrained):
    coords = log_spaced_coords(window, pretrained)
    coords = coords.view(1, 2 * window[0] - 1, 2 * window[1] - 1, 2)
    assert coords_window(coords) == window
    if window[0] == window[1]:
        assert coords_pretrained_window(coords) == pretrained


def test_rows_alone():
    assert square_window(169) == (7, 7)
    assert square_window(529) == (12, 12)
    assert square_window(345) is None  # 8x12
    assert square_window(16) is None  # an even side is no table


def test_81_rows_are_5x5_or_2x14():
    table = {"a.relative_position_bias_table": torch.zeros(81, 2)}
    assert attention_window(table, "a.") == (5, 5)
    table["a.relative_position_index"] = relative_position_index((2, 14))
    assert attention_window(table, "a.") == (2, 14)
    table["a.relative_position_index"] = relative_position_index((7, 7))  # stale
    assert attention_window(table, "a.") == (5, 5)


def test_rectangular_window_without_its_index_is_refused():
    state = dict(build("torchvision", 1, window=(4, 6)).state_dict())
    assert load_checkpoint(state).model.config.window_size == (4, 6)
    state = {n: t for n, t in state.items() if "index" not in n}
    with pytest.raises(CheckpointError, match=r"77 rows, which fits no square .* pass config="):
        load_checkpoint(state)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_explicit_hints_win(version):
    model = reference("microsoft", version)
    config = config_of(model).replace(window_convention="torchvision", layer_norm_eps=1e-3)
    loaded = load_checkpoint(dict(model.state_dict()), config=config)
    assert loaded.model.config is config
    assert loaded.report.config_from == "config"


def test_model_name_tells_v2_windows_but_not_the_classes():
    sizes = {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)}
    model = our_model(2, image_size=(256, 256), window_size=16, num_classes=5, **sizes)
    from fastswin.models.checkpoint import timm

    state = timm.from_official(model.state_dict(), model.config)
    loaded = load_checkpoint(state, model_name="swinv2_tiny_window16_256.ms_in1k")
    assert loaded.report.config_from == "model_name"
    assert loaded.model.config == model.config
    assert loaded.model.config.stage_window(3) == (8, 8)


@pytest.mark.parametrize(
    ("drop", "message"),
    [("patch_embed.proj.weight", r"cannot be told without patch_embed.proj.weight; pass config="),
     ("layers.0.blocks.0.", "stages or blocks are missing")],
    ids=["patch-embedding", "block"],
)  # fmt: skip
def test_what_cannot_be_told_is_named(drop, message):
    state = {n: t for n, t in our_model(1).state_dict().items() if not n.startswith(drop)}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(state)


def test_video_swin_is_refused():
    state = dict(our_model(1).state_dict())
    state["patch_embed.proj.weight"] = torch.zeros(24, 3, 2, 4, 4)
    with pytest.raises(
        CheckpointError, match=r"patch_embed.proj.weight has shape \(24, 3, 2, 4, 4\)"
    ):
        load_checkpoint(state)


def test_config_survives_json():
    config = SwinConfig(downsample_norm_eps=1e-6, pretrained_window_sizes=(1, 2, 3, 4), version=2)
    assert SwinConfig.from_dict(config.to_dict()) == config
    assert infer_config(our_model(1).state_dict(), "timm").window_convention == "timm"

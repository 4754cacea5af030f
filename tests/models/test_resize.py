"""Other resolutions: derived buffers, bias tables, position embeddings (SWO-19)."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from swin_references import build, images_of, logits, our_model

from fastswin.models import CheckpointError, SwinTransformer, load_checkpoint
from fastswin.models.checkpoint import resize_bias_table
from fastswin.ops.window_attention.geometry import relative_position_index, shift_attention_mask


def ramp(window, scale=(1.0, 1.0)):
    """``0.1 * dy + 0.01 * dx``, and head 1 turned: ``[(2 Wh - 1) * (2 Ww - 1), 2]``."""
    dy = torch.arange(-(window[0] - 1), window[0]) * scale[0]
    dx = torch.arange(-(window[1] - 1), window[1]) * scale[1]
    dy, dx = dy[:, None], dx[None, :]
    return torch.stack((0.1 * dy + 0.01 * dx, 0.01 * dy + 0.1 * dx), -1).flatten(0, 1)


@pytest.mark.parametrize(
    ("source", "target"),
    [((7, 7), (12, 12)), ((12, 12), (7, 7)), ((8, 12), (12, 8)), ((8, 12), (7, 7)),
     ((4, 4), (4, 6))],
    ids=lambda w: f"{w[0]}x{w[1]}",
)  # fmt: skip
def test_ramp_is_preserved_inside(source, target):
    """Half-pixel centres scale offsets by (2 W - 1) / (2 W' - 1); the border rows are clamped."""
    resized = resize_bias_table(ramp(source), target, source_window=source)
    factors = [(2 * s - 1) / (2 * t - 1) for s, t in zip(source, target, strict=True)]
    expected = ramp(target, factors)
    grid = (2 * target[0] - 1, 2 * target[1] - 1, 2)
    inside = (slice(2, -2), slice(2, -2))
    error = (resized.view(grid) - expected.view(grid))[inside].abs().max()
    assert resized.shape == expected.shape
    assert error <= 1e-2


def test_resize_is_torchs_bicubic_per_head():
    table = torch.randn(169, 3, generator=torch.Generator().manual_seed(0))
    resized = resize_bias_table(table, (12, 12))
    for head in range(3):
        plane = table[:, head].view(1, 1, 13, 13)
        expected = F.interpolate(plane, size=(23, 23), mode="bicubic", align_corners=False)
        torch.testing.assert_close(resized[:, head], expected.flatten(), atol=1e-6, rtol=0)


def test_resize_is_not_timms_geometric_one():
    from timm.layers import resize_rel_pos_bias_table

    table = torch.randn(169, 3, generator=torch.Generator().manual_seed(0))
    geometric = resize_rel_pos_bias_table(table, (12, 12), (529, 3))
    assert (resize_bias_table(table, (12, 12)) - geometric).abs().max() > 1.0


def test_equal_window_is_the_same_table():
    table = torch.randn(345, 2)
    assert resize_bias_table(table, (8, 12), source_window=(8, 12)) is table


@pytest.mark.parametrize(
    ("rows", "source", "message"),
    [(345, None, "345 rows, which fits no square window"),
     (345, (7, 7), "345 rows, but a window of 7x7 has 169")],
    ids=["unknown-source", "wrong-source"],
)  # fmt: skip
def test_no_square_root_of_a_rectangular_table(rows, source, message):
    with pytest.raises(CheckpointError, match=message):
        resize_bias_table(torch.zeros(rows, 2), (7, 7), source_window=source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_resize_keeps_the_dtype(dtype):
    assert resize_bias_table(torch.ones(169, 2, dtype=dtype), (12, 12)).dtype == dtype


# --- through the loader ----------------------------------------------------------------------

SMALL = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "image_size": (56, 56)}


@pytest.fixture(scope="module")
def trained():
    """Window 7 on a ramp, with the buffers an original release carries."""
    model = our_model(1, window_size=7, **SMALL)
    with torch.no_grad():
        for layer in model.layers:
            for block in layer.blocks:
                block.attn.relative_position_bias_table.copy_(ramp((7, 7)))
    state = dict(model.state_dict())
    for i in (0, 1):
        for j in (0, 1):
            stem = f"layers.{i}.blocks.{j}."
            state[stem + "attn.relative_position_index"] = relative_position_index((7, 7))
        state[f"layers.{i}.blocks.1.attn_mask"] = shift_attention_mask((14, 14), (7, 7), (3, 3))
    return model, state


@pytest.mark.parametrize("image", [(56, 56), (112, 112), (112, 168)], ids=str)
def test_equal_window_at_any_resolution_is_bit_for_bit(trained, image):
    """The masks in the dict are for 4 windows; the target needs up to 16 and ignores them."""
    model, state = trained
    config = model.config.replace(image_size=image)
    loaded = load_checkpoint(state, config=config)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert len(loaded.report.ignored) == 6
    assert not loaded.report.reshaped
    assert logits(loaded.model, images_of(image, 2)).isfinite().all()


def test_other_window_is_refused_by_default(trained):
    model, state = trained
    config = model.config.replace(window_size=12, image_size=(96, 96))
    message = (
        r"layers.0.blocks.0.attn.relative_position_bias_table has shape \[169, 2\], the model "
        r"needs \[529, 2\] for a window of 12x12; pass resize_bias='bicubic'"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(state, config=config)


def test_other_window_is_resized_on_request(trained, caplog):
    model, state = trained
    config = model.config.replace(window_size=12, image_size=(96, 96))
    with caplog.at_level(logging.INFO, logger="fastswin"):
        loaded = load_checkpoint(state, config=config, resize_bias="bicubic")
    table = loaded.model.layers[0].blocks[0].attn.relative_position_bias_table
    inside = (table - ramp((12, 12), (13 / 23, 13 / 23))).view(23, 23, 2)[2:-2, 2:-2]
    assert inside.abs().max() <= 1e-2
    name = "layers.0.blocks.0.attn.relative_position_bias_table"
    assert f"{name} [169, 2] -> [529, 2] (bicubic)" in loaded.report.reshaped
    assert len(loaded.report.reshaped) == 4
    assert "reshaped 4" in str(loaded.report)
    assert f"{name} resized from 13x13 to 23x23 (bicubic)" in caplog.text


@pytest.mark.parametrize("stale", [(7, 7), (3, 5)], ids=["ws7", "rectangular"])
def test_stale_index_is_ignored(stale):
    """A ws-12 table beside the index of another window: the table's rows decide."""
    model = our_model(1, **{**SMALL, "window_size": 12, "image_size": (96, 96)})
    state = dict(model.state_dict())
    for i in (0, 1):
        for j in (0, 1):
            stem = f"layers.{i}.blocks.{j}.attn."
            state[stem + "relative_position_index"] = relative_position_index(stale)
    loaded = load_checkpoint(state)
    assert loaded.model.config.window_size == (12, 12)
    assert torch.equal(
        logits(loaded.model, images_of((96, 96))), logits(model, images_of((96, 96)))
    )


def test_turned_rectangle_is_not_taken_for_the_same_window():
    """8x12 and 12x8 have 345 rows each; the index tells them apart."""
    theirs = build("torchvision", 1, window=(8, 12))
    state = dict(theirs.state_dict())
    config = load_checkpoint(state).model.config
    assert config.window_size == (8, 12)
    turned = config.replace(window_size=(12, 8))
    with pytest.raises(CheckpointError, match=r"for a window of 12x8; pass resize_bias='bicubic'"):
        load_checkpoint(state, config=turned)
    loaded = load_checkpoint(state, config=turned, resize_bias="bicubic")
    assert len(loaded.report.reshaped) == 4
    bare = {n: t for n, t in state.items() if "index" not in n}
    with pytest.raises(
        CheckpointError, match="fits no square window; its own window must be known"
    ):
        load_checkpoint(bare, config=config.replace(window_size=(7, 7)), resize_bias="bicubic")


def test_position_embeddings_are_resized_on_request():
    model = build("microsoft", 1, image=(32, 32), ape=True)
    state = dict(model.state_dict())
    config = load_checkpoint(state).model.config.replace(image_size=(64, 96))
    with pytest.raises(
        CheckpointError, match=r"absolute_pos_embed has shape \[1, 64, 24\].*bicubic"
    ):
        load_checkpoint(state, config=config)
    loaded = load_checkpoint(state, config=config, resize_bias="bicubic")
    assert loaded.model.absolute_pos_embed.shape == (1, 16 * 24, 24)
    plane = state["absolute_pos_embed"].view(8, 8, 24).permute(2, 0, 1)[None]
    expected = F.interpolate(plane, size=(16, 24), mode="bicubic", align_corners=False)
    actual = loaded.model.absolute_pos_embed.detach().view(16, 24, 24).permute(2, 0, 1)[None]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)


def test_derived_buffers_are_never_in_our_state_dict():
    for version in (1, 2):
        names = SwinTransformer(our_model(version).config).state_dict()
        assert not [n for n in names if "index" in n or "mask" in n or "coords" in n]

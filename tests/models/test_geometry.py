"""Odd maps, padding order and small maps (SWO-01, SWO-02, SWO-03)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from microsoft_style import MsSwin
from swin_references import build, images_of, logits, our_model, perturb

from fastswin import ops
from fastswin.models import SwinConfig, SwinTransformer, from_live
from fastswin.models.geometry import resolve_window, runtime_shift
from fastswin.models.swin import PatchMerging

CONVENTIONS = ("microsoft", "timm", "torchvision")


def merge_by_hand(x, merging, version):
    """Patch merging token by token, zeros where a neighbour is outside the map."""
    B, H, W, C = x.shape
    rows, columns = (H + 1) // 2, (W + 1) // 2
    out = torch.empty(B, rows, columns, 2 * C, dtype=x.dtype)
    for i in range(rows):
        for j in range(columns):
            cells = []
            for dy, dx in ((0, 0), (1, 0), (0, 1), (1, 1)):
                y, z = 2 * i + dy, 2 * j + dx
                cells.append(x[:, y, z] if y < H and z < W else torch.zeros(B, C, dtype=x.dtype))
            token, norm = torch.cat(cells, -1), merging.norm
            if version == 1:
                token = F.layer_norm(token, (4 * C,), norm.weight, norm.bias, 1e-5)
            token = token @ merging.reduction.weight.T
            if version == 2:
                token = F.layer_norm(token, (2 * C,), norm.weight, norm.bias, 1e-5)
            out[:, i, j] = token
    return out


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("side", "merged"),
    [((7, 10), (4, 5)), ((10, 7), (5, 4)), ((7, 7), (4, 4)), ((1, 1), (1, 1))],
    ids=["odd-height", "odd-width", "both-odd", "one-token"],
)
def test_merging_pads_the_odd_axis(side, merged, version):
    torch.manual_seed(0)
    config = SwinConfig(version=version, embed_dim=8, depths=(1, 1), num_heads=(1, 1))
    merging = perturb(PatchMerging(config, 0)).double()
    x = torch.randn(1, *side, 8, dtype=torch.float64)
    out = merging(x)
    assert tuple(out.shape) == (1, *merged, 16)
    torch.testing.assert_close(out, merge_by_hand(x, merging, version), atol=1e-12, rtol=0)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_112_pixels_reaches_an_odd_map(convention):
    """Maps 28, 14, 7, 4: the third is odd, the fourth smaller than the window of 7."""
    config = SwinConfig(
        image_size=(112, 112), embed_dim=12, depths=(1, 2, 1, 2), num_heads=(1, 2, 4, 8),
        num_classes=5, window_convention=convention,
    )  # fmt: skip
    assert [config.map_size(stage) for stage in range(4)] == [(s, s) for s in (28, 14, 7, 4)]
    out = logits(perturb(SwinTransformer(config)), images_of((112, 112), 2))
    assert out.shape == (2, 5)
    assert out.isfinite().all()


@pytest.mark.parametrize("framework", ["timm", "torchvision", "huggingface"])
@pytest.mark.parametrize("size", [(56, 80), (80, 56)], ids=["odd-height", "odd-width"])
def test_whole_model_with_one_odd_map(framework, size):
    """Maps 14x20 and 20x14 become 7x10 and 10x7 before the last merging."""
    settings = {"depths": (1, 1, 1), "num_heads": (2, 4, 4)}  # no shift: padding order is no matter
    theirs = build(framework, 1, image=size, window=2, **settings)
    difference = logits(from_live(theirs), images_of(size)) - logits(theirs, images_of(size))
    assert difference.abs().max() <= 1e-5


def far_pairs(map_size, window, shift):
    """Pairs of real tokens that attend to each other and lie a window or more apart.

    Token ``(y, x)`` sends its coordinates as its value and every weight is equal, so a second
    moment beyond the window's shows a far pair; pairs are counted through one-hot values.
    """
    H, W = map_size
    tokens = H * W
    qkv = torch.zeros(1, H, W, 3 * tokens)
    qkv[0, ..., 2 * tokens :] = torch.eye(tokens).view(H, W, tokens)
    out = ops.window_attention(
        qkv, num_heads=1, window_size=(window, window), shift_size=(shift, shift), scale=1.0
    )
    attends = out.view(tokens, tokens) > 1e-9
    y, x = torch.arange(tokens) // W, torch.arange(tokens) % W
    far = ((y[:, None] - y).abs() >= window) | ((x[:, None] - x).abs() >= window)
    assert attends.any(dim=1).all()
    return int((attends & far).sum())


@pytest.mark.parametrize(
    ("map_size", "window"),
    [((16, 16), 7), ((15, 20), 7), ((9, 9), 8), ((14, 14), 7), ((10, 10), 7)],
    ids=["16x16", "15x20", "9x9", "14x14", "10x10"],
)
def test_padding_comes_before_the_shift(map_size, window):
    assert far_pairs(map_size, window, window // 2) == 0


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    "size", [(60, 80), (64, 64), (36, 36), (56, 56)], ids=["15x20", "16x16", "9x9", "14x14"]
)
def test_padded_maps_agree_with_torchvision(size, version):
    settings = {"depths": (2,), "num_heads": (2,)}
    theirs = build("torchvision", version, window=8 if size == (36, 36) else 7, **settings)
    difference = logits(from_live(theirs), images_of(size)) - logits(theirs, images_of(size))
    assert difference.abs().max() <= 1e-5


def test_padded_maps_agree_with_transformers():
    theirs = build("huggingface", 1, image=(60, 80), window=7, depths=(2,), num_heads=(2,))
    difference = logits(from_live(theirs), images_of((60, 80))) - logits(
        theirs, images_of((60, 80))
    )
    assert difference.abs().max() <= 1e-5


#: map, window, and per convention the (window, shift) of a shifted block
SMALL_MAPS = {
    "4x4-w8": ((4, 4), 8, {
        "microsoft": ((4, 4), (0, 0)), "timm": ((4, 4), (0, 0)), "torchvision": ((8, 8), (0, 0))}),
    "5x14-w7": ((5, 14), 7, {
        "microsoft": ((5, 5), (0, 0)), "timm": ((5, 7), (0, 3)), "torchvision": ((7, 7), (0, 3))}),
    "7x14-w7": ((7, 14), 7, {
        "microsoft": ((7, 7), (0, 0)), "timm": ((7, 7), (0, 3)), "torchvision": ((7, 7), (0, 3))}),
    "6x20-w7": ((6, 20), 7, {
        "microsoft": ((6, 6), (0, 0)), "timm": ((6, 7), (0, 3)), "torchvision": ((7, 7), (0, 3))}),
}  # fmt: skip


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("case", SMALL_MAPS.values(), ids=SMALL_MAPS.keys())
def test_window_larger_than_map(case, convention):
    map_size, window, expected = case
    assert resolve_window(map_size, (window, window), convention) == expected[convention]


@pytest.mark.parametrize("framework", ["timm", "torchvision", "microsoft"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("case", SMALL_MAPS.values(), ids=SMALL_MAPS.keys())
def test_small_maps_agree_with_the_framework(case, version, framework):
    """One shifted stage on the small map; maps the framework itself cannot cut are cropped."""
    (rows, columns), window, expected = case
    if framework == "microsoft":  # it asserts on maps that are no multiple of its window
        columns -= columns % expected["microsoft"][0][0]
    if framework == "timm":  # it pads after the shift, so padded maps differ by design
        columns -= columns % expected["timm"][0][1]
    size = (4 * rows, 4 * columns)
    theirs = build(framework, version, image=size, window=window, depths=(2,), num_heads=(2,))
    ours = from_live(theirs)
    assert (logits(ours, images_of(size)) - logits(theirs, images_of(size))).abs().max() <= 1e-5


def test_192x640_in_four_stages():
    """Maps 48x160, 24x80, 12x40, 6x20 with window 7: the last has fewer rows than the window."""
    sizes = {"embed_dim": 12, "depths": (1, 1, 1, 2), "num_heads": (1, 2, 4, 8)}
    theirs = build("torchvision", 1, window=7, **sizes)
    difference = logits(from_live(theirs), images_of((192, 640), 1)) - logits(
        theirs, images_of((192, 640), 1)
    )
    assert difference.abs().max() <= 1e-5
    timm = from_live(build("timm", 1, image=(192, 640), window=7, **sizes))
    assert timm.config.stage_window(3) == (6, 7)
    microsoft = from_live(MsSwin((192, 640), 12, (1, 1, 1, 2), (1, 2, 4, 8), 7))
    assert microsoft.config.stage_window(3) == (6, 6)


@pytest.mark.parametrize("convention", ["microsoft", "timm"])
def test_smaller_images_than_the_table_allows_are_refused(convention):
    model = our_model(image_size=(56, 56), window_size=7, window_convention=convention)
    with pytest.raises(ValueError, match="stage 1: the token map 4x7 is smaller than the window"):
        model(images_of((32, 56)))


def test_one_axis_without_shift_at_run_time():
    assert runtime_shift((7, 14), (7, 7), "timm", stage=0) == (0, 3)
    assert runtime_shift((7, 14), (7, 7), "microsoft", stage=0) == (0, 0)

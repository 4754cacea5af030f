"""What the operator means: masks, padding, shift, cosine, hidden rows."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Case, arguments, oracle

from fastswin import ops
from fastswin.ops.window_attention.geometry import shift_attention_mask, window_kinds

IMPLS = ["triton", "reference"]


def one_query(randn, device, scores, mask, impl):
    """Softmax weights over keys, read off by giving each key a unit value vector."""
    keys = len(scores)
    dim = 16
    q = torch.zeros(1, 1, keys, dim, device=device)
    k = torch.zeros(1, 1, keys, dim, device=device)
    q[..., 0] = 1.0
    for i, score in enumerate(scores):
        k[0, 0, i, 0] = score
    v = torch.zeros(1, 1, keys, dim, device=device)
    v[0, 0, :, :keys] = torch.eye(keys, device=device)
    out = ops.window_attention_partitioned(q, k, v, mask=mask, scale=1.0, impl=impl)
    return out[0, 0, 0, :keys]


@pytest.mark.parametrize("impl", IMPLS)
def test_finite_float_mask_is_an_ordinary_number(impl, randn, device):
    """SWO-05: -100 added to a score of 100 leaves it equal to the allowed key's 0."""
    mask = torch.tensor([[[0.0, -100.0], [0.0, -100.0]]], device=device)
    weights = one_query(randn, device, [-100.0, 100.0], mask, impl)
    assert weights[1].item() == pytest.approx(1.0, abs=1e-6)
    weights = one_query(randn, device, [0.0, 100.0], mask, impl)
    assert weights.tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("value", [1, 2])
def test_bool_mask_hides_exactly(impl, dtype, value, randn, device):
    mask = (torch.tensor([[[0, value], [0, value]]], device=device)).to(dtype)
    weights = one_query(randn, device, [-100.0, 100.0], mask, impl)
    assert weights.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_cosine_leak_through_the_finite_mask(impl, device):
    """SWO-05 in V2: at the clamp a masked key of cosine +1 beats an allowed one of -1."""
    q = torch.zeros(1, 1, 2, 16, device=device)
    k = torch.zeros(1, 1, 2, 16, device=device)
    q[..., 0], k[0, 0, 0, 0], k[0, 0, 1, 0] = 3.0, -2.0, 5.0
    v = torch.zeros(1, 1, 2, 16, device=device)
    v[0, 0, :, :2] = torch.eye(2, device=device)
    mask = torch.tensor([[[0.0, -100.0], [0.0, -100.0]]], device=device)
    scale = torch.tensor([math.log(100.0) + 5.0], device=device)  # clamped to ln 100
    options = {"logit_scale": scale, "impl": impl}
    leaked = ops.window_attention_partitioned(q, k, v, mask=mask, **options)[0, 0, 0, :2]
    assert leaked[1].item() == pytest.approx(1.0, abs=1e-6)
    hidden = ops.window_attention_partitioned(q, k, v, mask=mask < 0, **options)[0, 0, 0, :2]
    assert hidden.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("impl", IMPLS)
def test_fully_hidden_query_gives_zeros_and_disturbs_nobody(impl, randn):
    q, k, v = (randn(6, 2, 9, 16) for _ in range(3))
    mask = torch.zeros(3, 9, 9, dtype=torch.bool, device=q.device)
    plain = ops.window_attention_partitioned(q, k, v, mask=mask, impl=impl)
    mask[1, 5] = True
    out = ops.window_attention_partitioned(q, k, v, mask=mask, impl=impl)
    assert torch.equal(out[1::3, :, 5], torch.zeros_like(out[1::3, :, 5]))
    rest = torch.ones(6, 9, dtype=torch.bool)
    rest[1::3, 5] = False
    assert torch.equal(out.transpose(1, 2)[rest], plain.transpose(1, 2)[rest])


@pytest.mark.parametrize("impl", IMPLS)
def test_mask_cycles_over_windows(impl, randn):
    """Window i uses mask[i % nW], window index fastest."""
    q, k, v = (randn(6, 2, 9, 16) for _ in range(3))
    mask = randn(3, 9, 9, spread=3.0)
    whole = ops.window_attention_partitioned(q, k, v, mask=mask, impl=impl)
    for window in range(6):
        one = slice(window, window + 1)
        alone = ops.window_attention_partitioned(
            q[one], k[one], v[one], mask=mask[window % 3][None], impl=impl
        )
        assert torch.equal(whole[one], alone)


@pytest.mark.parametrize(
    ("map_size", "window", "shift"),
    [((16, 16), 7, 3), ((15, 20), 7, 3), ((9, 9), 8, 4), ((14, 14), 7, 3), ((10, 10), 7, 3)],
    ids=str,
)
@pytest.mark.parametrize("impl", IMPLS)
def test_opposite_edges_never_meet(map_size, window, shift, impl, randn):
    """SWO-02: of two tokens at least a window apart, none may move the other's output."""
    case = Case("far", map_size, (window, window), (shift, shift), num_heads=1, batch=1)
    made = arguments(case, randn, torch.float32)
    base = ops.window_attention(**made, impl=impl)
    moved = made | {"qkv": made["qkv"].clone()}
    moved["qkv"][:, :, 0] += 1.0  # the whole first column
    changed = (ops.window_attention(**moved, impl=impl) - base).abs().amax(dim=(0, 1, 3))
    assert bool((changed[window:] == 0).all())
    assert bool((changed[:1] > 0).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_padded_token_is_the_projection_of_zeros(impl, randn):
    """A padded map equals the map that holds qkv_bias where the padding is."""
    case = Case("padded", (9, 10), (7, 7), (3, 3))
    made = arguments(case, randn, torch.float32)
    padded = made["qkv_bias"].expand(2, 14, 14, -1).clone()
    padded[:, :9, :10] = made["qkv"]
    explicit = ops.window_attention(**(made | {"qkv": padded}), impl=impl)
    implicit = ops.window_attention(**made, impl=impl)
    torch.testing.assert_close(implicit, explicit[:, :9, :10], atol=1e-6, rtol=0)
    zeros = ops.window_attention(**(made | {"qkv_bias": None}), impl=impl)
    assert not torch.allclose(zeros, implicit)


def test_kinds_of_window_rebuild_the_official_mask():
    """The nine-region image mask of the official code, window by window."""
    (H, W), window, shift = (14, 21), 7, 3
    image = torch.zeros(H, W)
    region = 0
    slices = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for rows in slices:
        for cols in slices:
            image[rows, cols] = region
            region += 1
    windows = image.view(2, 7, 3, 7).permute(0, 2, 1, 3).reshape(6, 49)
    expected = (windows[:, None, :] != windows[:, :, None]).float() * -100.0
    actual = shift_attention_mask((H, W), (window, window), (shift, shift))
    assert torch.equal(actual, expected)
    assert window_kinds((H, W), (7, 7)).tolist() == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_norm_in_cosine_attention_is_finite(impl, randn):
    """normalize clamps the norm at 1e-12: a zero query attends by bias alone."""
    case = Case("zero", (8, 8), (8, 8), cosine=True, num_heads=1, batch=1)
    made = arguments(case, randn, torch.float32)
    made["qkv"] = torch.zeros_like(made["qkv"])
    made["qkv"][..., 32:] = randn(1, 8, 8, 16)
    out = ops.window_attention(**made, impl=impl)
    torch.testing.assert_close(out.double(), oracle(made), atol=1e-5, rtol=0)

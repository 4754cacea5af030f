"""What the numbers mean: hidden keys, hidden rows, fills, NaN, lengths; kernel and reference."""

import math

import pytest
import torch

from fastswin.ops.masked_softmax import grouped_tril_softmax, masked_softmax

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["triton", "reference", "auto"])
def impl(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float -inf"])
def test_fully_hidden_row_gives_zeros_and_zero_gradient(impl, dtype, kind, randn):
    x = randn(2, 3, 9, 9, dtype=dtype).requires_grad_()
    hidden = torch.zeros(2, 1, 9, 9, dtype=torch.bool, device=x.device)
    hidden[1, 0, 5] = True
    mask = hidden
    if kind == "float -inf":
        mask = torch.zeros(hidden.shape, dtype=dtype, device=x.device)
        mask = mask.masked_fill(hidden, -math.inf)
    y = masked_softmax(x, mask=mask, impl=impl)
    (dx,) = torch.autograd.grad(y, x, randn(2, 3, 9, 9, dtype=dtype))
    assert (y[1, :, 5] == 0).all()
    assert (dx[1, :, 5] == 0).all()
    plain = masked_softmax(x, impl=impl)
    rows = torch.arange(9, device=x.device) != 5
    assert torch.equal(y[:, :, rows], plain[:, :, rows]), "other rows changed"
    assert torch.isfinite(dx).all()


@pytest.mark.parametrize("fill", [-100.0, -1e4])
def test_finite_fill_over_a_whole_row_is_an_ordinary_shift(impl, fill, randn):
    x = randn(2, 9)
    mask = torch.full((9,), fill, device=x.device)
    y = masked_softmax(x, mask=mask, impl=impl)
    # the sum is rounded in fp32 before the maximum is taken off, there as here
    assert torch.allclose(y, (x + mask).softmax(-1), rtol=1e-6, atol=1e-7)


def test_finite_fill_can_lose_against_a_large_score(impl, device):
    x = torch.tensor([[-100.0, 0.0], [-90.0, 0.0]], device=device)
    fill = torch.tensor([0.0, -100.0], device=device)
    hide = torch.tensor([False, True], device=device)
    added = masked_softmax(x, mask=fill, scale=1.0, impl=impl)
    assert torch.allclose(added[0], torch.tensor([0.5, 0.5], device=device))
    assert torch.equal(masked_softmax(x, mask=hide, impl=impl)[:, 1], x.new_zeros(2))


@pytest.mark.parametrize("value", [1, 2, 255])
def test_bool_and_uint8_hide_alike(impl, value, randn):
    x = randn(1, 1, 4, 4, dtype=torch.float16)
    hide = torch.tensor([False, False, False, True], device=x.device)
    want = masked_softmax(x, mask=hide, impl=impl)
    got = masked_softmax(x, mask=hide.to(torch.uint8) * value, impl=impl)
    assert torch.equal(got, want)
    assert (want[..., 3] == 0).all()


@pytest.mark.parametrize("mask_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float_mask_of_another_dtype_is_added_in_fp32(impl, mask_dtype, randn):
    x = randn(1, 1, 4, 4, dtype=torch.float16)
    mask = torch.tensor([0, 0, 0, -100.0], device=x.device, dtype=mask_dtype)
    want = (x.float() + mask.float()).softmax(-1)
    assert torch.allclose(masked_softmax(x, mask=mask, impl=impl).float(), want, atol=5e-4)


def test_nan_at_a_visible_key_gives_a_nan_row_only(impl, randn):
    x = randn(4, 33)
    x[1, 7] = math.nan
    y = masked_softmax(x, impl=impl)
    assert torch.isnan(y[1]).all()
    assert torch.isfinite(y[[0, 2, 3]]).all()


def test_nan_under_a_bool_mask_is_ignored(impl, randn):
    x = randn(4, 33)
    clean = x.clone()
    hide = torch.zeros(33, dtype=torch.bool, device=x.device)
    hide[7] = True
    x[1, 7] = math.nan
    bias = randn(33)
    got = masked_softmax(x, bias=bias, mask=hide, impl=impl)
    assert torch.equal(got, masked_softmax(clean, bias=bias, mask=hide, impl=impl))


def test_infinite_scores(impl, device):
    x = torch.full((3, 5), -math.inf, device=device)
    x[1, 2] = 0.0
    x[2, 2] = math.inf
    y = masked_softmax(x, impl=impl)
    assert (y[0] == 0).all()
    assert torch.equal(y[1], torch.tensor([0.0, 0, 1, 0, 0], device=device))
    assert torch.isnan(y[2]).all()


@pytest.mark.parametrize("scores", ["zeros", "randn"])
def test_grouped_tril_rows_sum_to_one_below_the_length_and_are_zero_above(impl, scores, randn):
    S, lens = 5, [0, 1, 4, 5]
    x = randn(4, 2, S, S) if scores == "randn" else randn(4, 2, S, S) * 0
    x.requires_grad_()
    y = grouped_tril_softmax(x, torch.tensor(lens, device=x.device), impl=impl)
    (dx,) = torch.autograd.grad(y, x, randn(4, 2, S, S))
    for b, length in enumerate(lens):
        for row in range(S):
            live = row + 1 if row < length else 0
            assert (y[b, :, row, live:] == 0).all()
            assert (dx[b, :, row, live:] == 0).all()
            if live:
                want = x[b, :, row, :live].softmax(-1)
                assert torch.allclose(y[b, :, row, :live], want, atol=1e-6)
    assert torch.isfinite(dx).all()
    if scores == "zeros":
        assert torch.allclose(y[3, :, 4], torch.tensor(0.2, device=x.device))


def test_grouped_tril_of_one_token_is_one(impl, device):
    one = torch.zeros(1, 1, 1, 1, device=device)
    assert grouped_tril_softmax(one, torch.tensor([1]), impl=impl).item() == 1.0


@pytest.mark.parametrize("int_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("where", ["cpu", "device"])
def test_lengths_of_either_dtype_and_place(impl, int_dtype, where, device):
    x = torch.full((2, 1, 3, 3), 6e4, device=device, dtype=torch.float16)
    lens = torch.tensor([2, 3], dtype=int_dtype, device=device if where == "device" else "cpu")
    y = grouped_tril_softmax(x, lens, impl=impl)
    assert torch.allclose(y[1, 0, 2].float(), torch.full((3,), 1 / 3, device=device), atol=5e-4)
    assert (y[0, 0, 2] == 0).all()


def test_what_lies_in_dead_tiles_is_never_looked_at(impl, randn):
    x, grad = randn(2, 1, 6, 6), randn(2, 1, 6, 6)
    lens = torch.tensor([4, 6], device=x.device)
    dead = torch.ones(6, 6, dtype=torch.bool, device=x.device).triu(1).expand(2, 1, 6, 6).clone()
    dead[0, :, 4:] = True

    def run(fill):
        leaf = x.masked_fill(dead, fill).requires_grad_()
        y = grouped_tril_softmax(leaf, lens, impl=impl)
        return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

    for clean, poisoned in zip(run(0.0), run(math.nan), strict=True):
        assert torch.equal(clean, poisoned)


def test_causal_is_aligned_top_left(impl, randn):
    x = randn(2, 3, 5)
    y = masked_softmax(x, causal=True, impl=impl)
    assert torch.equal(y[:, 0], torch.eye(5, device=x.device)[0].expand(2, 5))
    assert (y[:, 1, 2:] == 0).all()


def test_lengths_without_causal_hide_rows_and_keys(impl, randn):
    x = randn(2, 4, 4)[:, None]
    y = masked_softmax(x, seq_lens=torch.tensor([3, 0]), impl=impl)
    assert torch.allclose(y[0, 0, :3, :3], x[0, 0, :3, :3].softmax(-1), atol=1e-6)
    assert (y[0, 0, 3] == 0).all()
    assert (y[0, 0, :, 3] == 0).all()
    assert (y[1] == 0).all()

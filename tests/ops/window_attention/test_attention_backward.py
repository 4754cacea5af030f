"""Every gradient of window attention against the fp64 reference, with random upstream gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import Case, arguments
from backward_cases import (
    CASES,
    DTYPES,
    LARGE,
    SHARED,
    check,
    gradients,
    output_shape,
    reference,
    triton,
    with_leaves,
)

from fastswin import ops
from fastswin.ops.window_attention.backward_config import takes_whole_windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case, dtype, randn):
    check(case, dtype, randn)


SUBSETS = [
    names
    for count in (1, 2, 3, 4)
    for names in itertools.combinations(("qkv", *SHARED), count)
]  # fmt: skip


def test_only_requested_gradients(randn):
    """SWO-13: each subset gives the same bits as all of them; the rest stays None."""
    case = Case("subset", (5, 3), (3, 3), (1, 1), cosine=True, num_heads=1, batch=1)
    made = arguments(case, randn, torch.float32)
    upstream = randn(*output_shape(case))
    every = gradients(triton, with_leaves(made), upstream)
    for names in SUBSETS:
        some = {k: v.clone().requires_grad_(k in names) if isinstance(v, torch.Tensor) else v
                for k, v in made.items()}  # fmt: skip
        triton(some).backward(upstream)
        for name in ("qkv", *SHARED):
            if name in names:
                assert torch.equal(some[name].grad, every[name]), names
            else:
                assert some[name].grad is None, names


def test_no_graph_where_nothing_needs_a_gradient(randn):
    made = arguments(CASES[1], randn, torch.float32)
    assert not triton(made).requires_grad
    with torch.no_grad():
        assert not triton(with_leaves(made)).requires_grad


LAYOUTS = {
    "expanded": lambda g: g[:1, :1, :1, :1].expand(g.shape),
    "transposed": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    "every-second": lambda g: torch.stack((g, g + 1), -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_the_upstream_gradient(layout, randn):
    """SWO-12: any strides, and nothing is modified."""
    made = arguments(CASES[1], randn, torch.float32)
    upstream = LAYOUTS[layout](randn(*output_shape(CASES[1])))
    before = upstream.clone()
    ours = gradients(triton, with_leaves(made), upstream)
    contiguous = gradients(triton, with_leaves(made), before)
    for name, gradient in contiguous.items():
        assert torch.equal(ours[name], gradient)
    assert torch.equal(upstream, before)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("case", [CASES[2], CASES[8]], ids=str)
def test_empty_batch_gives_zeros_not_none(impl, case, randn):
    """SWO-11."""
    made = arguments(case, randn, torch.float32)
    made["qkv"] = made["qkv"][:0]
    leaves = with_leaves(made)
    out = ops.window_attention(**leaves, impl=impl)
    out.sum().backward()
    assert leaves["qkv"].grad.shape == made["qkv"].shape
    for name in ("bias", "logit_scale"):
        assert torch.equal(leaves[name].grad, torch.zeros_like(made[name]))


def test_logit_scale_above_its_clamp_has_no_gradient(randn):
    case = Case("clamped", (4, 4), (4, 4), cosine=True, batch=1)
    made = arguments(case, randn, torch.float32)
    made["logit_scale"] = torch.tensor([2.0, 9.0], device=made["qkv"].device)
    leaves = with_leaves(made)
    triton(leaves).backward(randn(*output_shape(case)))
    assert leaves["logit_scale"].grad[0] != 0
    assert leaves["logit_scale"].grad[1] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_real_sizes(case, dtype, randn):
    check(case, dtype, randn)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_three_runs_bitwise(case, randn):
    made = arguments(case, randn, torch.bfloat16) | {"dropout_p": 0.1, "dropout_seed": 3}
    upstream = randn(*output_shape(case), dtype=torch.bfloat16)
    runs = [gradients(triton, with_leaves(made), upstream) for _ in range(3)]
    for name, first in runs[0].items():
        assert torch.equal(first, runs[1][name])
        assert torch.equal(first, runs[2][name])


@pytest.mark.gpu
def test_tf32_gradients_are_within_its_rounding(randn):
    made = arguments(LARGE[0], randn, torch.float32)
    upstream = randn(*output_shape(LARGE[0]))
    truth = gradients(reference, with_leaves(made, torch.float64), upstream)
    ours = gradients(triton, with_leaves(made | {"input_precision": "tf32"}), upstream)
    for name in ("qkv", "bias"):
        assert (ours[name] - truth[name]).norm() < 2e-3 * truth[name].norm()


@pytest.mark.gpu
def test_backward_of_more_windows_than_a_grid_axis_other_than_x_takes(randn):
    case = Case("many", (2, 2), (2, 2), num_heads=2, batch=70_000)
    made = arguments(case, randn, torch.float16)
    upstream = randn(*output_shape(case), dtype=torch.float16)
    ours = gradients(triton, with_leaves(made), upstream)
    last = with_leaves(made | {"qkv": made["qkv"][-1:]})
    triton(last).backward(upstream[-1:])
    torch.testing.assert_close(ours["qkv"][-1:], last["qkv"].grad)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [LARGE[0], LARGE[2]], ids=str)
def test_only_inputs_and_row_statistics_are_kept(case, randn):
    """No scores, no mask, no windows: a forward leaves its output, and two numbers a row."""
    made = with_leaves(arguments(case, randn, torch.float16))
    triton(made)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = triton(made)
    kept = torch.cuda.memory_allocated() - before
    tokens = case.batch * case.map_size[0] * case.map_size[1]
    stats = 0 if takes_whole_windows(case.window_size[0] ** 2, 32, 2) else 8 * tokens
    assert kept <= out.nbytes + stats * case.num_heads + 2**20

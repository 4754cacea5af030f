"""Every gradient of window attention against the fp64 reference, with random upstream gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_cases import Case, arguments, eager

from fastswin import ops
from fastswin.ops.window_attention.backward_config import (
    TileConfig,
    TiledBackwardConfig,
    default_backward_config,
    exact_tail,
    number_of_runs,
    takes_whole_windows,
)
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.tables import table_gradient
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, *HALF]  # the interpreter's bf16 products are garbage (Triton 3.8)

SHARED = ("bias", "logit_scale", "qkv_bias")

#: Small enough for the interpreter; each one a way to be wrong. Above 64 tokens in tiles.
CASES = [
    Case("n49-shifted", (7, 14), (7, 7), (0, 3), num_heads=1, batch=1),
    Case("n16-shifted-padded", (7, 5), (4, 4), (2, 2), num_heads=1),
    Case("n64-cosine-shifted", (8, 8), (8, 8), (4, 4), cosine=True, num_heads=1, batch=1),
    Case("rectangular-cosine-padded", (7, 3), (5, 3), (2, 1), cosine=True, batch=1),
    Case("window-of-one", (2, 3), (1, 1), num_heads=1, batch=1),
    Case("window-wider-than-map", (3, 4), (5, 5), num_heads=1, batch=1),
    Case("head-dim-24", (4, 4), (4, 4), (0, 2), head_dim=24),
    Case("n72-tiles-padded", (7, 10), (8, 9), (0, 4), num_heads=1, batch=1),
    Case("n81-tiles-cosine-shifted", (9, 9), (9, 9), (4, 4), num_heads=1, batch=1, cosine=True),
    Case("n150-tiles", (10, 15), (10, 15), num_heads=1, batch=1),
]

LARGE = [
    Case("swin-t-stage1", (56, 56), (7, 7), (3, 3), 3, 32, batch=16),
    Case("swin-t-stage4", (7, 7), (7, 7), (0, 0), 24, 32, batch=64),
    Case("swin-b-384", (48, 48), (12, 12), (6, 6), 4, 32, batch=8),
    Case("swinv2-w8", (64, 64), (8, 8), (4, 4), 3, 32, cosine=True, batch=8),
    Case("swinv2-w16", (32, 32), (16, 16), (8, 8), 4, 32, cosine=True, batch=8),
    Case("swinv2-w24", (48, 48), (24, 24), (12, 12), 4, 32, cosine=True, batch=4),
    Case("detection-padded", (100, 167), (7, 7), (3, 3), 3, 32, batch=2),
]


def with_leaves(made: dict, dtype: torch.dtype | None = None) -> dict:
    """Fresh leaves of every tensor, in ``dtype`` where one is given."""
    return {
        k: v.detach().to(dtype or v.dtype).requires_grad_() if isinstance(v, torch.Tensor) else v
        for k, v in made.items()
    }


def gradients(attend, made: dict, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient; zeros where eager never touched a tensor."""
    names = ["qkv", *(n for n in SHARED if n in made)]
    out = attend(made)
    found = torch.autograd.grad(
        out, [made[n] for n in names], upstream.to(out.dtype), materialize_grads=True
    )
    return {"out": out, **dict(zip(names, found, strict=True))}


def triton(made: dict) -> torch.Tensor:
    return ops.window_attention(**made, impl="triton")


def reference(made: dict) -> torch.Tensor:
    return ops.window_attention(**made, impl="reference")


def output_shape(case: Case) -> tuple[int, ...]:
    return case.batch, *case.map_size, case.num_heads * case.head_dim


def check(case: Case, dtype: torch.dtype, randn, options: dict | None = None) -> None:
    made = arguments(case, randn, dtype) | (options or {})
    upstream = randn(*output_shape(case), dtype=dtype)
    ours = gradients(triton, with_leaves(made), upstream)
    oracle = gradients(reference, with_leaves(made, torch.float64), upstream)
    framework = reference if options else eager  # only the reference draws the same weights
    theirs = gradients(framework, with_leaves(made, dtype), upstream)
    for name, truth in oracle.items():
        kept = ours[name].dtype
        if name == "logit_scale":
            error = (ours[name].double() - truth).abs()
            assert bool((error <= temperature_rounding(made, upstream)).all())
            continue
        assert_close_to_oracle(ours[name], theirs[name].to(kept), truth, kept)


def temperature_rounding(made: dict, upstream: torch.Tensor) -> torch.Tensor:
    """What rounding may do to dlogit_scale, nH numbers that are sums of terms of both signs.

    A rounded score of size t (cosine 1 at temperature t) moves its weight by eps * t, and each
    image's term with it; eager's own error on so few numbers is a matter of luck.
    """
    leaves = with_leaves(made, torch.float64)
    out = reference(leaves)
    terms = torch.zeros_like(leaves["logit_scale"])
    for image in range(out.shape[0]):
        for row in range(out.shape[1]):
            part = torch.zeros_like(out)
            part[image, row] = upstream[image, row]
            (term,) = torch.autograd.grad(out, leaves["logit_scale"], part, retain_graph=True)
            terms += term.abs()
    temperature = leaves["logit_scale"].detach().exp().clamp(max=100.0)
    return 2 * torch.finfo(made["qkv"].dtype).eps * (1 + temperature) * terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case, dtype, randn):
    check(case, dtype, randn)


@pytest.mark.parametrize("case", [CASES[1], CASES[7]], ids=str)
def test_dropout_draws_the_same_weights_again(case, randn):
    check(case, torch.float32, randn, {"dropout_p": 0.4, "dropout_seed": 11})


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[3], CASES[7]], ids=str)
def test_bias_gradient_of_the_projection_is_summed_on_the_way(case, randn):
    """As a pass over dqkv would give it, padded tokens included; of whole windows and tiles."""
    made = arguments(case, randn, torch.float32)
    made["qkv_bias"] = randn(made["qkv"].shape[-1])
    upstream = randn(*output_shape(case))
    alone = gradients(triton, with_leaves(made), upstream)
    both = gradients(triton, with_leaves(made | {"sum_qkv_grad": True}), upstream)
    assert torch.equal(both["qkv"], alone["qkv"])
    expected = alone["qkv_bias"] + alone["qkv"].flatten(0, 2).sum(0)
    torch.testing.assert_close(both["qkv_bias"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", [0, 2**40 + 17])
def test_dropout_of_kernel_and_reference_agree(seed, randn):
    made = arguments(CASES[1], randn, torch.float32) | {"dropout_p": 0.3, "dropout_seed": seed}
    torch.testing.assert_close(triton(made), reference(made), atol=1e-5, rtol=0)
    made["dropout_seed"] = seed + 1
    assert not torch.allclose(triton(made), reference(made | {"dropout_seed": seed}), atol=1e-2)


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


def test_gradient_of_padding_is_that_of_the_padded_map(randn):
    """qkv_bias gets what a map that holds it at its padded tokens would get there."""
    case = CASES[1]
    made = arguments(case, randn, torch.float32)
    upstream = randn(*output_shape(case))
    ours = gradients(triton, with_leaves(made), upstream)
    rows, cols = (-(-s // 4) * 4 for s in case.map_size)
    full = made["qkv_bias"].expand(case.batch, rows, cols, -1).clone()
    full[:, : case.map_size[0], : case.map_size[1]] = made["qkv"]
    whole = with_leaves(made | {"qkv": full})
    padded = torch.zeros(case.batch, rows, cols, upstream.shape[3], device=upstream.device)
    padded[:, : case.map_size[0], : case.map_size[1]] = upstream
    triton(whole).backward(padded)
    gradient = whole["qkv"].grad
    gradient[:, : case.map_size[0], : case.map_size[1]] = 0.0
    torch.testing.assert_close(ours["qkv_bias"], gradient.sum((0, 1, 2)), atol=1e-4, rtol=1e-5)
    assert torch.equal(ours["qkv_bias"][:16], torch.zeros_like(ours["qkv_bias"][:16]))


def test_logit_scale_above_its_clamp_has_no_gradient(randn):
    case = Case("clamped", (4, 4), (4, 4), cosine=True, batch=1)
    made = arguments(case, randn, torch.float32)
    made["logit_scale"] = torch.tensor([2.0, 9.0], device=made["qkv"].device)
    leaves = with_leaves(made)
    triton(leaves).backward(randn(*output_shape(case)))
    assert leaves["logit_scale"].grad[0] != 0
    assert leaves["logit_scale"].grad[1] == 0


@pytest.mark.parametrize("tokens", [9, 80], ids=["whole", "tiles"])
@pytest.mark.parametrize("mask", ["none", "float", "bool"])
def test_partitioned(mask, tokens, randn):
    """Windows that are cut already; a query without a visible key has a gradient of zero."""
    heads, windows = (2, 6) if tokens == 9 else (1, 2)
    shape = (windows, heads, tokens, 16)
    q, k, v = (randn(*shape) for _ in range(3))
    bias, upstream = randn(heads, tokens, tokens), randn(*shape).transpose(1, 2).contiguous()
    upstream = upstream.transpose(1, 2)
    masks = {
        "none": None,
        "float": randn(2, tokens, tokens, spread=3.0),
        "bool": randn(2, tokens, tokens) > 0.3,
    }
    if mask == "bool":
        masks["bool"][1, 5] = True
    results = {}
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v, bias)]
        added = masks[mask]
        if mask == "float":
            added = added.to(dtype)
        out = ops.window_attention_partitioned(
            *leaves[:3], bias=leaves[3], mask=added, impl=impl
        )  # fmt: skip
        results[impl] = torch.autograd.grad(out, leaves, upstream.to(dtype))
    for ours, truth in zip(*results.values(), strict=True):
        torch.testing.assert_close(ours.double(), truth, atol=3e-5, rtol=1e-5)
    if mask == "bool":
        assert torch.equal(results["triton"][0][1::2, :, 5], torch.zeros_like(q[1::2, :, 5]))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_partitioned_gives_only_what_is_asked_for(name, randn):
    made = {n: randn(2, 2, 9, 16) for n in ("q", "k", "v")} | {"bias": randn(2, 9, 9)}
    upstream = randn(2, 2, 9, 16)
    results = []
    for wanted in (("q", "k", "v", "bias"), (name,)):
        leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in made.items()}
        ops.window_attention_partitioned(**leaves, impl="triton").backward(upstream)
        results.append(leaves)
    assert torch.equal(results[0][name].grad, results[1][name].grad)
    assert all(t.grad is None for n, t in results[1].items() if n != name)


def test_mask_with_a_gradient_is_refused_by_name(randn):
    q, k, v = (randn(2, 1, 4, 16) for _ in range(3))
    mask = randn(2, 4, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient of mask"):
        ops.window_attention_partitioned(q, k, v, mask=mask, impl="triton")


def test_bias_table_gradient(randn):
    """Sum of the dense gradient over all pairs at one relative position, without an index."""
    rows, cols = 4, 3
    table = randn((2 * rows - 1) * (2 * cols - 1), 2).requires_grad_()
    dense = expand_bias_table(table, (rows, cols))
    upstream = randn(*dense.shape)
    dense.backward(upstream)
    want = torch.zeros_like(table)
    for q, k in itertools.product(range(rows * cols), repeat=2):
        dy, dx = q // cols - k // cols, q % cols - k % cols
        at = (dy + rows - 1) * (2 * cols - 1) + dx + cols - 1
        assert torch.equal(dense[:, q, k], table[at])
        want[at] += upstream[:, q, k]
    torch.testing.assert_close(table.grad, want, atol=1e-5, rtol=1e-5)


def test_bias_table_gets_the_gradient_of_the_dense_bias(randn):
    case = Case("table", (4, 3), (4, 3), batch=1)
    made = arguments(case, randn, torch.float32)
    upstream = randn(*output_shape(case))
    table = randn(7 * 5, 2).requires_grad_()
    dense = expand_bias_table(table, (4, 3))
    ours = gradients(triton, with_leaves(made | {"bias": dense.detach()}), upstream)["bias"]
    (want,) = torch.autograd.grad(dense, table, ours)
    found = []
    for _ in range(2):
        table.grad = None
        triton(made | {"bias": None, "bias_table": table}).backward(upstream)
        found.append(table.grad)
    torch.testing.assert_close(found[0], want, atol=1e-6, rtol=1e-5)  # another order of the sum
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("window", "dtype", "runs"),
    [((4, 3), torch.float32, 0), ((4, 3), torch.float16, 37), ((5, 13), torch.float32, 2)],
    ids=str,
)
def test_partial_sums_become_the_gradient_of_a_table(window, dtype, runs, randn):
    """Padded query and key columns hold what no sum may read."""
    (rows, cols), heads = window, 2 if window == (4, 3) else 1
    tokens, padded = rows * cols, rows * cols + 4
    partial = torch.full((runs, heads, padded, padded), float("nan"), device=randn(1).device)
    partial[..., :tokens, :tokens] = randn(runs, heads, tokens, tokens)
    table = randn((2 * rows - 1) * (2 * cols - 1), heads, dtype=dtype)
    wide = table.double().requires_grad_()
    dense = partial[..., :tokens, :tokens].double().sum(0)
    (truth,) = torch.autograd.grad(expand_bias_table(wide, window), wide, dense)
    actual = table_gradient(partial, table, window)
    assert actual.dtype == dtype
    bound = 2 * torch.finfo(dtype).eps * max(1.0, truth.abs().max().item())
    assert (actual - truth).abs().max() <= bound


def test_a_bias_table_is_differentiable_twice(randn):
    qkv, table, upstream = randn(1, 4, 6, 48), randn(9, 1), randn(1, 4, 6, 16)
    found = []
    for impl in ("triton", "reference"):
        leaves = [qkv.clone().requires_grad_(), table.clone().requires_grad_()]
        out = ops.window_attention(
            leaves[0], num_heads=1, window_size=(2, 2), bias_table=leaves[1], impl=impl
        )
        first = torch.autograd.grad(out, leaves, upstream, create_graph=True)
        found.append([*first, *torch.autograd.grad([g.square().sum() for g in first], leaves)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", range(1, 600, 11))
def test_tiles_cover_every_token_once(tokens):
    for head_dim, itemsize in ((32, 2), (32, 4), (128, 2)):
        config = default_backward_config(tokens, head_dim, itemsize)
        if takes_whole_windows(tokens, head_dim, itemsize):
            continue
        assert isinstance(config, TiledBackwardConfig)
        for tile in (config.dq, config.dkv):
            steps = len(range(0, tokens - tile.tail, tile.walked))
            covered = steps * tile.walked + tile.tail
            assert tokens <= covered < tokens + tile.walked
            assert not tile.tail or steps == tokens // tile.walked


def test_runs_follow_from_the_shape():
    assert [number_of_runs(264, heads, 8192) for heads in (3, 6, 12, 24)] == [88, 44, 22, 11]
    assert number_of_runs(264, 500, 10) == 1
    assert number_of_runs(264, 3, 10) == 10
    assert [exact_tail(144, w) for w in (128, 64, 32, 16)] == [16, 16, 16, 0]
    assert TileConfig(16, 128).tail == 0


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

"""Longer windows in runs of one kind: the answers of the tiled form, and of the fp64 reference."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from attention_cases import Case
from backward_cases import check

from fastswin.ops.window_attention import backward, backward_config
from fastswin.ops.window_attention.backward import (
    window_attention_bwd,
    window_attention_partitioned_bwd,
)
from fastswin.ops.window_attention.backward_config import (
    RUNS_PREPARED,
    PassBackwardConfig,
    RowsBackwardConfig,
    TileConfig,
    TiledBackwardConfig,
    default_backward_config,
)
from fastswin.ops.window_attention.backward_problem import Needs
from fastswin.ops.window_attention.forward import (
    window_attention_fwd,
    window_attention_partitioned_fwd,
)
from fastswin.ops.window_attention.tables import pack_tables

TILED = TiledBackwardConfig(TileConfig(32, 32), TileConfig(32, 32), None)
DKV = TileConfig(16, 32)

#: Windows of 20 tokens in tiles of 16: few windows a run, runs of every kind.
FORMS = {
    "one pass": PassBackwardConfig(16, 16, num_warps=4, programs=5),
    "rows, whole": RowsBackwardConfig(16, 16, 16, 16, num_warps=4, programs=5),
    "rows, split": RowsBackwardConfig(16, 0, 16, 16, num_warps=4, programs=10, dkv=DKV),
}


CASES = [
    Case("shifted", (8, 15), (4, 5), (2, 2), num_heads=1, batch=1),
    Case("cosine-columns-shifted", (4, 10), (4, 5), (0, 2), num_heads=1, batch=1, cosine=True),
    Case("cosine-two-heads-and-images", (4, 5), (4, 5), num_heads=2, cosine=True),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case, form, randn):
    dtype = torch.float32 if case.num_heads == 2 else torch.float16
    with mock.patch.object(backward, "default_backward_config", return_value=FORMS[form]) as taken:
        check(case, dtype, randn)
    taken.assert_called()


@pytest.mark.parametrize("form", ["one pass", "rows, split"])
def test_windows_that_are_cut_already(form, randn):
    """Strides of their own for q, k and v, and only some gradients: the answers of tiles."""
    q, v = randn(2, 2, 20, 16), randn(2, 20, 2, 16).transpose(1, 2)
    k, grad = randn(2, 2, 20, 48)[..., 16:32], randn(2, 2, 20, 16)
    packed, _ = pack_tables(randn(2, 20, 20), None, 2, (1, 20), (0, 0), q.device)
    stats = torch.full((2, 2, 20, 2), float("nan"), device=q.device)
    out = window_attention_partitioned_fwd(
        q, k, v, packed, None, None, 0.25, False, row_stats=stats
    )
    for q_needed, bias_needed in ((True, False), (False, True)):
        needs = Needs(q_needed, True, not q_needed, bias_needed, False, pad=False, qkv_sum=False)
        results = []
        for config in (FORMS[form], TILED):
            gradients, sums = window_attention_partitioned_bwd(
                grad, q, k, v, out, stats, packed, None, None, 0.25, False, needs, None, config
            )
            results.append([t for t in (*gradients, sums.bias) if t is not None and t.numel()])
            assert [t.numel() > 0 for t in gradients] == [q_needed, True, not q_needed]
        bound = 4 * torch.finfo(torch.float32).eps
        for ours, theirs in zip(*results, strict=True):
            assert (ours - theirs).abs().max() <= bound * max(1.0, float(theirs.abs().max()))


def test_what_goes_in_runs():
    """2 bytes, 32 channels and 9.0, without dropout, padding and a mask; nothing until chosen."""
    problem = {"tokens": 144, "head_dim": 32, "itemsize": 2, "unmasked": True}
    prepared = RUNS_PREPARED[144]
    assert default_backward_config(**problem) == backward_config.RUNS_CHOSEN.get(
        144, default_backward_config(**problem | {"unmasked": False})
    )
    with mock.patch.object(backward_config, "RUNS_CHOSEN", RUNS_PREPARED):
        assert default_backward_config(**problem) == prepared
        for other in (
            {"unmasked": False}, {"itemsize": 4}, {"head_dim": 64}, {"capability": (8, 0)},
            {"tokens": 256},
        ):  # fmt: skip
            assert isinstance(default_backward_config(**problem | other), TiledBackwardConfig)


#: What the models have, and forms to choose from.
REAL = {
    "rows": RUNS_PREPARED[144],
    "one pass": PassBackwardConfig(),
    "rows, whole": RowsBackwardConfig(128, 16, 128, 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", REAL)
@pytest.mark.parametrize("cosine", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_real_sizes(dtype, cosine, form, randn):
    case = Case("window-12", (48, 48), (12, 12), (6, 6), 4, 32, cosine=cosine, batch=8)
    with mock.patch.object(backward, "default_backward_config", return_value=REAL[form]) as taken:
        check(case, dtype, randn)
    taken.assert_called()


@pytest.mark.gpu
@pytest.mark.parametrize("form", REAL)
def test_three_runs_bitwise(form, randn):
    """On poisoned memory, with more windows than programs."""
    window, shift, heads, D = (12, 12), (6, 6), 4, 32
    qkv = randn(8, 96, 96, 3 * heads * D, dtype=torch.bfloat16)
    grad = randn(8, 96, 96, heads * D, dtype=torch.bfloat16)
    packed, _ = pack_tables(randn(heads, 144, 144), None, heads, window, shift, qkv.device)
    shared = (packed, None, None, D**-0.5, heads, window, shift, False)
    stats = torch.full((512, heads, 144, 2), float("nan"), device=qkv.device)
    out = window_attention_fwd(qkv, *shared, row_stats=stats)
    needs = Needs(True, True, True, bias=True, logit_scale=False, pad=False, qkv_sum=False)
    runs = []
    for _ in range(3):
        poison = [torch.full_like(qkv, float("nan")), qkv.new_full((1 << 25,), float("nan"))]
        del poison
        dqkv, sums = window_attention_bwd(grad, qkv, out, stats, *shared, needs, None, REAL[form])
        assert bool(torch.isfinite(dqkv).all())
        runs.append((dqkv, sums.bias))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))

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
    BackwardConfig,
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


def assert_same(ours: list, theirs: list, dtype: torch.dtype) -> None:
    """Up to the rounding of a few products; four times that for sums over every row (1-d)."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            units = 16 if one.ndim == 1 else 4
            bound = units * torch.finfo(dtype).eps * max(1.0, float(other.abs().max()))
            assert (one.double() - other.double()).abs().max() <= bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("map_size", "shift", "heads", "cosine", "dtype"),
    [
        ((8, 15), (2, 2), 1, False, torch.float16),
        ((4, 10), (0, 2), 1, True, torch.float16),
        ((4, 5), (0, 0), 2, True, torch.float32),
    ],
    ids=["shifted", "cosine, columns shifted", "cosine fp32, two heads"],
)
def test_the_answers_are_those_of_tiles(map_size, shift, heads, cosine, dtype, form, randn):
    window, D = (4, 5), 16
    qkv = randn(1, *map_size, 3 * heads * D, dtype=dtype)
    grad = randn(1, *map_size, heads * D, dtype=dtype)
    temperature = randn(heads) + 2 if cosine else None
    bias, device = randn(heads, 20, 20), qkv.device
    packed, head_scale = pack_tables(bias, temperature, heads, window, shift, device)
    shared = (packed, head_scale, None, D**-0.5, heads, window, shift, False)
    windows = map_size[0] // 4 * map_size[1] // 5
    stats = torch.full((windows, heads, 20, 2), float("nan"), device=device)
    out = window_attention_fwd(qkv, *shared, row_stats=stats)

    def run(config: BackwardConfig) -> list:
        needs = Needs(True, True, True, bias=True, logit_scale=cosine, pad=False, qkv_sum=True)
        dqkv, sums = window_attention_bwd(grad, qkv, out, stats, *shared, needs, None, config)
        return [dqkv, sums.bias, sums.qkv_bias, sums.logit_scale]

    assert_same(run(FORMS[form]), run(TILED), dtype)


@pytest.mark.parametrize("form", ["one pass", "rows, split"])
def test_windows_that_are_cut_already(form, randn):
    """Strides of their own for q, k and v, and only some gradients."""
    q, v = randn(2, 2, 20, 16), randn(2, 20, 2, 16).transpose(1, 2)
    k, grad = randn(2, 2, 20, 48)[..., 16:32], randn(2, 2, 20, 16)
    packed, _ = pack_tables(randn(2, 20, 20), None, 2, (1, 20), (0, 0), q.device)
    stats = torch.full((2, 2, 20, 2), float("nan"), device=q.device)
    out = window_attention_partitioned_fwd(
        q, k, v, packed, None, None, 0.25, False, row_stats=stats
    )
    for q_needed, bias_needed in ((True, False), (False, True)):
        needs = Needs(q_needed, True, not q_needed, bias_needed, False, pad=False, qkv_sum=False)
        found = []
        for config in (FORMS[form], TILED):
            gradients, sums = window_attention_partitioned_bwd(
                grad, q, k, v, out, stats, packed, None, None, 0.25, False, needs, None, config
            )
            found.append([*gradients, sums.bias])
            assert [t.numel() > 0 for t in gradients] == [q_needed, True, not q_needed]
        assert_same([t for t in found[0] if t is None or t.numel()],
                    [t for t in found[1] if t is None or t.numel()], torch.float32)  # fmt: skip


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
    configs = mock.Mock(return_value=REAL[form])
    with mock.patch.object(backward, "default_backward_config", configs):
        check(case, dtype, randn)
    configs.assert_called()


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

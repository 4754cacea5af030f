"""The form by heads with statistics that another product has left: the result without them."""

from __future__ import annotations

import pytest
import torch
from attention_half_cases import in_dtype, make_half

from fastswin import ops
from fastswin.engine.operators import packed_heads_attention
from fastswin.ops.attention_half.config import HeadsConfig
from fastswin.ops.attention_half.packing import pack_projection
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.ops.window_attention.packing import pack_bias
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])

EPS = 1e-5

#: Maps, tiles, and parts of a row that have statistics of their own.
CASES = {
    "shifted, two images": (
        {"batch": 2, "map_size": (7, 14), "channels": 48, "heads": 3}, HeadsConfig(16), 3,
    ),
    "padded map, shifted": (
        {"map_size": (5, 9), "window": (4, 4), "shift": (2, 2), "channels": 48, "heads": 3},
        HeadsConfig(16, num_stages=2), 2,
    ),
    "padded map, two images, window of 7": (
        {"batch": 2, "map_size": (6, 9), "channels": 64}, HeadsConfig(32, num_stages=2), 1,
    ),
    "window wider than high, no shift": (
        {"map_size": (6, 10), "window": (3, 5), "shift": (0, 0)}, HeadsConfig(32, num_stages=2), 4,
    ),
    "shift on one axis": (
        {"map_size": (4, 8), "window": (4, 4), "shift": (0, 1), "channels": 64}, HeadsConfig(64), 1,
    ),
}  # fmt: skip


def attend(made, config, stats, pdl=False):
    x, heads = made["x"], made["num_heads"]
    window, shift = made["window_size"], made["shift_size"]
    return packed_heads_attention(
        x, made["qkv_weight"], pack_projection(made["qkv_weight"], made["qkv_bias"], None), None,
        pack_bias(made["bias"], heads, window, shift, x.device), None, made["pad_qkv"],
        (x.shape[3] // heads) ** -0.5, heads, window, shift, EPS, config, pdl=pdl,
        norm_stats=stats,
    )  # fmt: skip


def statistics(x, parts):
    stats = torch.empty(2, parts, x.shape[:-1].numel(), device=x.device)
    write_stats_ref(x, stats)
    return stats


def check(made, config, parts):
    """With and without statistics against eager and the oracle; both alike but for rounding."""
    dtype = made["x"].dtype
    stats = statistics(made["x"], parts)
    before = made["x"].clone(), stats.clone()
    found = attend(made, config, stats, pdl=True)
    without = attend(made, config, None)
    assert torch.equal(made["x"], before[0])
    assert torch.equal(stats, before[1])
    oracle = ops.attention_half(**in_dtype(made, torch.float64), eps=EPS, impl="reference")
    eager = ops.attention_half(**in_dtype(made, dtype), eps=EPS, impl="reference")
    assert_close_to_oracle(found, eager, oracle, dtype)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, without, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_given_statistics_are_those_of_its_own_pass(name, dtype, randn):
    settings, config, parts = CASES[name]
    made = make_half(randn, **settings, offset=False, dtype=dtype)
    rows = made["x"].shape[:-1].numel()
    # a row's mean and deviation are its own: another row's statistics would show
    own = torch.arange(rows).view(*made["x"].shape[:-1], 1).to(made["x"])
    made["x"] = (made["x"] - 1) * (1 + own % 7 / 4) + own % 5
    check(made, config, parts)


def test_statistics_of_rows_with_a_large_mean(randn):
    """A mean of 40 deviations, in parts whose means differ."""
    made = make_half(
        randn, map_size=(4, 4), window=(4, 4), shift=(0, 0), channels=48, heads=3, offset=False
    )
    made["x"] = randn(1, 4, 4, 48, dtype=torch.float16) + 40
    made["x"][..., 16:] += 2
    check(made, HeadsConfig(16), 3)


@pytest.mark.parametrize("wrong", ["rows", "means"])
def test_statistics_of_others_would_show(wrong, randn):
    """The next row's means and deviations, or means alone."""
    settings, config, _ = CASES["padded map, shifted"]
    made = make_half(randn, **settings, offset=False)
    right = statistics(made["x"], 2)
    given = right.roll(1, 2) if wrong == "rows" else right * torch.tensor([1.0, 0.0])[:, None, None]
    difference = (attend(made, config, given) - attend(made, config, right)).abs().max()
    assert difference > 0.05

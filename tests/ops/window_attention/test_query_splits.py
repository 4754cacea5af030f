"""Programs that share the queries of a window: the same bits as one program for all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fastswin.ops.window_attention.config import (
    WindowAttentionConfig,
    default_config,
    key_tiles,
    num_programs,
)
from fastswin.ops.window_attention.forward import window_attention_fwd
from fastswin.ops.window_attention.packing import pack_bias, pack_head_scale


@pytest.mark.parametrize(
    ("device", "window", "splits", "cosine"),
    [
        ("cpu", (6, 5), 2, False),
        ("cpu", (3, 6), 2, True),
        *(
            pytest.param("cuda", window, splits, cosine, marks=pytest.mark.gpu)
            for window, splits in (((9, 8), 2), ((12, 12), 3), ((10, 15), 10))
            for cosine in (False, True)
        ),
    ],
)
def test_shared_queries_change_no_bit(device, window, splits, cosine):
    """Shifted windows on a map that is not square, queries in tiles of 16."""
    height, width = window
    tokens = height * width
    rng = torch.Generator(device).manual_seed(3)
    qkv = torch.randn(2, 2 * height, width, 192, generator=rng, device=device).half()
    bias = torch.randn(2, tokens, tokens, generator=rng, device=device)
    table = pack_bias(bias, 2, window, (2, 0), qkv.device)
    head_scale = pack_head_scale(torch.randn(2, generator=rng, device=device) + 2)
    whole = WindowAttentionConfig(16, key_tiles(tokens), 1, num_stages=2)
    stats = [torch.full((4, 2, tokens, 2), torch.nan, device=device) for _ in range(2)]

    def run(config, row_stats):
        return window_attention_fwd(
            qkv, table, head_scale if cosine else None, None, 32**-0.5, 2, window, (2, 0), False,
            out=torch.full_like(qkv[..., :64], torch.nan), config=config, row_stats=row_stats,
        )  # fmt: skip

    expected = run(whole, stats[0])
    got = run(dataclasses.replace(whole, query_splits=splits), stats[1])
    assert expected.isfinite().all()
    assert torch.equal(got, expected)
    assert torch.equal(stats[0], stats[1])


@pytest.mark.parametrize(
    ("windows", "heads", "config"),
    [
        (1, 16, (32, 2, 3, 5)),  # queries, warps, stages, programs of a window and head
        (4, 16, (64, 4, 3, 3)),
        (4, 24, (64, 4, 3, 1)),
        (64, 4, (64, 4, 3, 1)),
        (66, 4, (32, 2, 2, 1)),
        (2048, 4, (32, 2, 2, 1)),
    ],
)
def test_windows_of_144_by_how_many_there_are(windows, heads, config):
    """From 132 multiprocessors: a window in one program only where there are many of them."""
    found = default_config(windows, 144, heads, 32, 2, 132)
    assert (found.block_q, found.num_warps, found.num_stages, found.query_splits) == config
    assert found.heads_per_program == 1
    assert found.key_tiles == (128, 16)
    programs = num_programs(windows, 144, heads, found)
    assert programs == windows * heads * config[3]


@pytest.mark.parametrize("tokens", [196, 256, 576])
def test_longer_windows_walk_over_keys_and_pipeline_what_fits(tokens):
    for windows in (1, 512):
        found = default_config(windows, tokens, 4, 32, 2, 132)
        assert (found.block_q, found.key_tiles, found.query_splits) == (64, (), 1)
        assert (found.block_k, found.num_stages) == (64, 3)
    assert default_config(1, tokens, 4, 32, 2, 132, table_itemsize=4).num_stages == 2
    assert default_config(1, tokens, 4, 32, 4, 132).num_stages == 2
    assert default_config(1, 49, 24, 32, 2, 132).query_splits == 1

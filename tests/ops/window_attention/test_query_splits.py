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
            for window, splits in (((9, 8), 2), ((12, 12), 3), ((16, 16), 16))
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


def test_few_windows_share_their_queries_and_many_do_not():
    few = default_config(1, 256, 16, 32, 2, 132)
    assert (few.block_q, few.query_splits, num_programs(1, 256, 16, few)) == (32, 8, 128)
    wide = default_config(4, 256, 16, 32, 2, 132)
    assert (wide.block_q, wide.query_splits, num_programs(4, 256, 16, wide)) == (64, 4, 256)
    assert default_config(4, 144, 16, 32, 2, 132).query_splits == 3
    assert default_config(64, 256, 4, 32, 2, 132).query_splits == 4
    assert default_config(66, 256, 4, 32, 2, 132).query_splits == 1
    assert default_config(1, 49, 24, 32, 2, 132).query_splits == 1
    assert default_config(1, 576, 16, 32, 2, 132).query_splits == 1

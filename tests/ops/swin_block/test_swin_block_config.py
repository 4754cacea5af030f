"""Limits, shared memory and packed weights of the cluster kernel, without a card."""

from __future__ import annotations

import pytest
import torch
from gluon_clusters import ROW

from fastswin._triton.cluster import why_no_clusters
from fastswin._triton.tensor_copy import _layout
from fastswin.ops.swin_block import config
from fastswin.ops.swin_block.config import (
    MAX_HEADS,
    MAX_TOKENS,
    MIN_TOKENS,
    live_threads,
    swin_block_blocker,
    tail_bytes,
)
from fastswin.ops.swin_block.packing import pack_block
from fastswin.testing.aot import SHARED_MEMORY_LIMIT

TOKENS = range(MIN_TOKENS, MAX_TOKENS + 1)
HEADS = range(2, MAX_HEADS + 1)

WINDOW, MAP = (7, 7), (56, 56)


@pytest.mark.parametrize("tokens", TOKENS)
def test_live_threads_are_those_that_hold_a_row(tokens):
    holds = (ROW < tokens).any(1)
    assert live_threads(tokens) == holds.sum() <= 128
    assert holds[: live_threads(tokens)].all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_reads_and_stores_stay_in_the_tail(tokens, heads):
    """Places as kernel.py lays them out, from wherever the tail begins."""
    threads, tail = live_threads(tokens), tail_bytes(heads, tokens)
    for end in range(200000, 200128):
        first = (end - tail + 127) // 128 * 128
        rows1 = first + 128 + 2 * heads * 512
        rows2 = rows1 + heads * threads * 32
        assert first >= end - tail
        # two 16-byte words of a piece, four of sums, each of 128 threads
        piece = rows2 + (heads - 1) * 32 * threads + 16 * threads + 16 * 128
        sums = rows1 + (heads - 1) * 64 * threads + 48 * threads + 16 * 128
        assert max(piece, sums) <= end
    assert max(piece, sums) - (rows2 + heads * threads * 32) <= 512
    assert rows2 % 16 == 0


def test_tail_is_no_larger_than_it_says():
    assert tail_bytes(3, 49) == 768 + 3 * (1024 + 64 * 100)
    assert tail_bytes(6, 64) == 768 + 6 * (1024 + 64 * 128)


@pytest.mark.parametrize("heads", HEADS)
def test_weights_and_tail_fit_a_multiprocessor(heads):
    """Weights, keys and values with what little comes beside them, and the tail."""
    limit = SHARED_MEMORY_LIMIT[90] * 1024
    weights = 768 * 32 * heads
    assert all(weights + tail_bytes(heads, tokens) + 10 * 1024 <= limit for tokens in TOKENS)


def test_one_head_more_would_not_fit():
    heads, limit = MAX_HEADS + 1, SHARED_MEMORY_LIMIT[90] * 1024
    least = 768 * 32 * heads + 8 * 1024 + 24
    assert all(least + tail_bytes(heads, tokens) > limit for tokens in TOKENS)


@pytest.mark.parametrize(
    ("C", "heads", "hidden", "window", "map_size", "reason"),
    [
        (96, 3, 384, WINDOW, MAP, None),
        (192, 6, 768, WINDOW, (28, 28), None),
        (64, 2, 256, (8, 8), (64, 8), None),
        (96, 3, 384, (4, 16), (64, 64), None),
        (96, 4, 384, WINDOW, MAP, "heads of 32 channels are needed, not 4 in 96"),
        (32, 1, 128, WINDOW, MAP, "1 heads: 2 to 6 programs hold a block's weights"),
        (224, 7, 896, WINDOW, MAP, "7 heads: 2 to 6 programs hold a block's weights"),
        (96, 3, 192, WINDOW, MAP, "an MLP of 384 units is needed, not 192"),
        (96, 3, 384, (6, 8), (48, 48), "windows of 49 to 64 tokens are needed, not 48"),
        (96, 3, 384, (5, 13), (50, 52), "windows of 49 to 64 tokens are needed, not 65"),
        (96, 3, 384, WINDOW, (56, 57), "a map of (56, 57) is no multiple of a window of (7, 7)"),
        (96, 3, 384, WINDOW, (55, 56), "a map of (55, 56) is no multiple of a window of (7, 7)"),
        (96, 3, 384, (8, 8), (4096, 8192), "tokens of one image are addressed in 32 bits"),
    ],
    ids=str,
)
def test_what_a_block_needs(C, heads, hidden, window, map_size, reason):
    assert swin_block_blocker(C, heads, hidden, window, map_size) == reason


def test_a_triton_without_its_dialect_says_so(monkeypatch):
    monkeypatch.setattr(config, "gluon_blocker", lambda: "this Triton lacks Gluon for Hopper: x")
    assert "lacks Gluon" in (swin_block_blocker(96, 3, 384, WINDOW, (56, 56)) or "")


def test_where_it_does_not_run(monkeypatch):
    assert why_no_clusters("cpu", (9, 0)) == "clusters of programs need a GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert why_no_clusters("cuda", (9, 0)) is None
    for capability in ((8, 0), (10, 0), (12, 0)):
        reason = why_no_clusters("cuda", capability)
        assert reason is not None
        assert "9.0" in reason
        assert str(capability) in reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_clusters("cuda", (9, 0)) == "clusters of programs need a GPU"


@pytest.mark.parametrize(
    ("tile", "seen_as"),
    [((128, 32), (32, 32)), ((128, 32), (64, 32)), ((32, 128), (32, 64))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tiles_seen_as_smaller_ones_lie_as_these_would(tile, seen_as, dtype):
    """One swizzle, whose pattern repeats after 8 rows, and rows as wide as it."""
    whole, part = _layout(*tile, dtype), _layout(*seen_as, dtype)
    assert whole.swizzle_byte_width == part.swizzle_byte_width == 2 * seen_as[1]
    assert whole.transposed == part.transposed
    assert seen_as[0] % 8 == 0


def test_packed_rows_of_a_head():
    """Of each head 32 rows of q, k, v and proj, in this order."""
    heads = 3
    C = 32 * heads
    qkv, proj = torch.randn(3 * C, C).half(), torch.randn(C, C).half()
    fc1, fc2 = torch.randn(4 * C, C).half(), torch.randn(C, 4 * C).half()
    norm = torch.randn(C), torch.randn(C)
    bias = torch.randn(3 * C).half()
    packed = pack_block((qkv, bias), (proj, None), (fc1, None), (fc2.T.contiguous().T, None), norm)
    assert packed.heads.shape == (4 * C, C)
    for head in range(heads):
        rows = packed.heads[128 * head : 128 * head + 128]
        own = slice(32 * head, 32 * head + 32)
        for number, matrix in enumerate((qkv[:C], qkv[C : 2 * C], qkv[2 * C :], proj)):
            assert torch.equal(rows[32 * number : 32 * number + 32], matrix[own])
    assert torch.equal(packed.fc1, fc1)
    assert torch.equal(packed.fc2, fc2)
    assert all(t.is_contiguous() for t in (packed.heads, packed.fc1, packed.fc2))
    assert torch.equal(packed.qkv_bias, bias.float())
    for zeros, size in ((packed.proj_bias, C), (packed.fc1_bias, 4 * C), (packed.fc2_bias, C)):
        assert torch.equal(zeros, torch.zeros(size))
    assert packed.norm1 is norm
    assert packed.norm2 is None

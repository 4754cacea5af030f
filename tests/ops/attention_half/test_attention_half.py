"""The attention half as one kernel against the fp64 oracle, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from attention_half_cases import in_dtype, make_half

from fastswin import ops
from fastswin.ops.attention_half.config import (
    HeadGroupConfig,
    WholeWindowConfig,
)
from fastswin.testing.tolerance import assert_close_to_oracle

DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])

#: More runs that must give the same bits; the interpreter runs programs one after another.
REPEATS = 2 if torch.cuda.is_available() else 0


def check(made: dict, **kernel: object) -> torch.Tensor:
    """Kernel (with its options), eager and oracle on the same inputs; the kernel's result."""
    dtype = made["x"].dtype
    before = made["x"].clone()
    first = ops.attention_half(**made, **kernel, impl="triton")
    for _ in range(REPEATS):
        assert torch.equal(first, ops.attention_half(**made, **kernel, impl="triton"))
    assert torch.equal(before, made["x"])
    oracle = ops.attention_half(**in_dtype(made, torch.float64), impl="reference")
    eager = ops.attention_half(**in_dtype(made, dtype), impl="reference")
    assert_close_to_oracle(first, eager, oracle, dtype)
    return first


HEAD_GROUPS = {
    "one head, shifted, two images": (
        {"batch": 2, "map_size": (7, 14), "channels": 48, "heads": 3},
        HeadGroupConfig(1),
    ),
    "three heads a program, padded map": (
        {"map_size": (5, 9), "window": (4, 4), "shift": (2, 2), "channels": 48, "heads": 3},
        HeadGroupConfig(3, num_stages=2),
    ),
    "window wider than high, no shift, no offset": (
        {"map_size": (6, 10), "window": (3, 5), "shift": (0, 0), "offset": False},
        HeadGroupConfig(2, num_stages=2),
    ),
    "shift on one axis": (
        {"map_size": (4, 8), "window": (4, 4), "shift": (0, 1), "channels": 64},
        HeadGroupConfig(1),
    ),
    "steps of channels, padded map": (
        {"map_size": (6, 9), "window": (7, 7), "channels": 64},
        HeadGroupConfig(1, block_k=32, num_stages=2),
    ),
    "cosine attention without LayerNorm in front": (
        {"map_size": (8, 4), "window": (4, 4), "shift": (2, 2), "version": 2},
        HeadGroupConfig(1),
    ),
    "cosine, steps of channels, window 8": (
        {"map_size": (8, 8), "window": (8, 8), "shift": (0, 0), "version": 2},
        HeadGroupConfig(1, block_k=16, num_stages=2),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", HEAD_GROUPS)
def test_head_groups(name, dtype, randn):
    settings, config = HEAD_GROUPS[name]
    check(make_half(randn, **settings, dtype=dtype), config=config, pdl=True)


WHOLE_WINDOWS = {
    "shifted, two images": (
        {"batch": 2, "map_size": (7, 14), "channels": 48, "heads": 3},
        WholeWindowConfig(),
    ),
    "padded map by the copy engine": (
        {"map_size": (5, 9), "window": (4, 4), "shift": (2, 2), "channels": 48, "heads": 3},
        WholeWindowConfig(tma=True),
    ),
    "one part of columns, no shift, no offset": (
        {"map_size": (6, 10), "window": (3, 5), "shift": (0, 0), "offset": False},
        WholeWindowConfig(num_stages=1),
    ),
    "V2: cosine, LayerNorm behind proj, window 8": (
        {"map_size": (8, 16), "window": (8, 8), "shift": (4, 4), "version": 2},
        WholeWindowConfig(),
    ),
    "V2, two parts of columns, padded map": (
        {"map_size": (3, 6), "window": (4, 4), "shift": (2, 2), "version": 2, "channels": 48,
         "heads": 3},
        WholeWindowConfig(tma=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE_WINDOWS)
def test_whole_windows(name, dtype, randn):
    settings, config = WHOLE_WINDOWS[name]
    made = make_half(randn, **settings, whole=True, dtype=dtype)
    expected = check(made, config=config, pdl=True)
    stream = made["x"].clone()
    written = ops.attention_half(**(made | {"x": stream}), out=stream, config=config, impl="triton")
    assert written is stream
    assert torch.equal(stream, expected)

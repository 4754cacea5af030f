"""The attention half as one kernel against the fp64 oracle, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from attention_half_cases import in_dtype, make_half

from fastswin import ops
from fastswin.ops.attention_half.config import (
    HeadsConfig,
    WholeWindowConfig,
    attention_half_blocker,
    default_heads_config,
    default_whole_window_config,
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
        HeadsConfig(16),
    ),
    "three heads, padded map": (
        {"map_size": (5, 9), "window": (4, 4), "shift": (2, 2), "channels": 48, "heads": 3},
        HeadsConfig(16, num_stages=2),
    ),
    "window wider than high, no shift, no offset": (
        {"map_size": (6, 10), "window": (3, 5), "shift": (0, 0), "offset": False},
        HeadsConfig(32, num_stages=2),
    ),
    "shift on one axis": (
        {"map_size": (4, 8), "window": (4, 4), "shift": (0, 1), "channels": 64},
        HeadsConfig(64),
    ),
    "steps of channels, padded map": (
        {"map_size": (6, 9), "window": (7, 7), "channels": 64},
        HeadsConfig(32, num_stages=2),
    ),
    "cosine attention without LayerNorm in front": (
        {"map_size": (8, 4), "window": (4, 4), "shift": (2, 2), "version": 2},
        HeadsConfig(32),
    ),
    "cosine, steps of channels, window 8": (
        {"map_size": (8, 8), "window": (8, 8), "shift": (0, 0), "version": 2},
        HeadsConfig(16, num_stages=2),
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
        WholeWindowConfig(num_stages=2),
    ),
    "padded map by the copy engine": (
        {"map_size": (5, 9), "window": (4, 4), "shift": (2, 2), "channels": 48, "heads": 3},
        WholeWindowConfig(num_stages=2, tma=True),
    ),
    "one part of columns, no shift, no offset": (
        {"map_size": (6, 10), "window": (3, 5), "shift": (0, 0), "offset": False},
        WholeWindowConfig(num_stages=3),
    ),
    "V2: cosine, LayerNorm behind proj, window 8": (
        {"map_size": (8, 16), "window": (8, 8), "shift": (4, 4), "version": 2},
        WholeWindowConfig(),
    ),
    "V2, two parts of columns, padded map": (
        {"map_size": (3, 6), "window": (4, 4), "shift": (2, 2), "version": 2, "channels": 48,
         "heads": 3},
        WholeWindowConfig(num_stages=2, tma=True),
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


def test_large_mean_loses_no_digits(randn):
    """LayerNorm behind the product: rows whose mean is 40 times their spread."""
    made = make_half(randn, map_size=(4, 4), window=(4, 4), shift=(0, 0), channels=48, heads=3)
    made["x"] = randn(1, 4, 4, 48, dtype=torch.float16) + 40
    check(made, config=HeadsConfig(16))


@pytest.mark.parametrize("whole", [False, True], ids=["heads", "window"])
def test_empty_batch_and_fp32(whole, randn):
    made = make_half(randn, map_size=(4, 4), window=(4, 4), shift=(0, 0), whole=whole)
    empty = made | {"x": made["x"][:0]}
    assert ops.attention_half(**empty, impl="triton").shape == (0, 4, 4, 32)
    wide = in_dtype(made, torch.float32)
    with pytest.raises(RuntimeError, match="float32 products are faster"):
        ops.attention_half(**wide, impl="triton")
    assert ops.attention_half(**wide).dtype == torch.float32


REFUSED = {
    "proj_weight": ({"proj_weight": (16, 16)}, r"proj_weight must be \(32, 32\)"),
    "proj_bias alone": ({"proj_bias": (32,)}, "need proj_weight"),
    "one norm": ({"norm_weight": (32,)}, "norm_weight and norm_bias together"),
    "shift": ({"shift_size": (4, 0)}, "shift < window on each axis"),
    "both scales": ({"logit_scale": (2,), "scale": 0.1}, "not both"),
    "heads": ({"num_heads": 5}, "multiple of num_heads=5"),
    "offset in V2": ({"norm_first": False}, "offset needs norm_first"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(name, randn):
    changes, message = REFUSED[name]
    made = make_half(randn, map_size=(4, 4), window=(4, 4), shift=(0, 0))
    for argument, value in changes.items():
        shape = argument.startswith(("proj", "norm_w", "logit"))
        made[argument] = randn(*value) if shape else value
    with pytest.raises(ValueError, match=message):
        ops.attention_half(**made)


def test_output_of_the_form_by_heads_is_never_its_input(randn):
    made = make_half(randn, map_size=(4, 4), window=(4, 4), shift=(0, 0))
    with pytest.raises(ValueError, match="other heads still read x"):
        ops.attention_half(**made, out=made["x"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((96, 3, 144, False), "144 tokens a window exceed 64"),
        ((96, 4, 49, False), "head_dim must be one of"),
        ((384, 12, 49, True), "384 channels exceed 192"),
        ((96, 3, 49, True, 2**31), "elements an image"),
        ((96, 3, 49, True, 0, HeadsConfig(32)), "config must be a WholeWindowConfig"),
        ((96, 3, 49, False, 0, HeadsConfig(64)), "steps of 64 channels must divide 96"),
        ((96, 3, 49, False, 0, HeadsConfig(32, num_stages=1)), "num_stages must be at least 2"),
        ((96, 3, 49, True, 0, WholeWindowConfig(num_stages=1)), "num_stages must be at least 2"),
    ],
    ids=["tokens", "head_dim", "channels", "image", "kind", "steps", "stages", "whole stages"],
)
def test_blockers(arguments, reason):
    assert reason in str(attention_half_blocker(*arguments))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)], ids=str)
@pytest.mark.parametrize("C", [96, 128, 192, 384, 512, 768, 1024, 1536])
def test_heuristics_are_legal(C, capability):
    config = default_heads_config(C, capability)
    assert attention_half_blocker(C, C // 32, 49, False, 0, config) is None
    if C <= 192:
        config = default_whole_window_config(C, capability)
        assert attention_half_blocker(C, C // 32, 49, True, 0, config) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("heads", {"map_size": (14, 14), "channels": 384, "heads": 12, "batch": 40}),
        ("heads", {"map_size": (13, 20), "channels": 768, "heads": 24, "batch": 8}),
        ("window", {"map_size": (56, 56), "channels": 96, "heads": 3, "batch": 40}),
        ("window", {"map_size": (51, 60), "channels": 128, "heads": 4, "batch": 24}),
        ("window", {"map_size": (28, 28), "channels": 192, "heads": 6, "batch": 24}),
        (
            "window",
            {"map_size": (64, 64), "channels": 96, "heads": 3, "batch": 24, "version": 2,
             "window": (8, 8), "shift": (4, 4)},
        ),
    ],
    ids=["stage 3", "stage 4, padded", "stage 1", "Swin-B, padded", "stage 2", "V2"],
)  # fmt: skip
def test_batches_that_fill_the_card(form, settings, dtype, randn):
    check(make_half(randn, **settings, whole=form == "window", dtype=dtype), pdl=True)

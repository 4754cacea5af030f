"""Attention on a compact bias table: what the table holds, and answers against the fp64 oracle."""

from __future__ import annotations

import math
import re

import pytest
import torch
from attention_cases import Case
from compact_bias_cases import TILES, make_problem

from fastswin.ops.window_attention.config import key_tiles, takes_compact_bias
from fastswin.ops.window_attention.geometry import expand_bias_table
from fastswin.ops.window_attention.packing import (
    LOG2_E,
    SHORT_RANGE,
    pack_compact_bias,
    shorten_compact_bias,
)
from fastswin.testing.poison import PoisonEmpty
from fastswin.testing.tolerance import assert_close_to_oracle

HALF = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])

CASES = [
    Case("n64-shifted", (16, 24), (8, 8), (4, 4)),
    Case("n64-cosine-padded", (10, 13), (8, 8), (4, 2), cosine=True),
    Case("n256-cosine-shifted", (32, 16), (16, 16), (8, 0), cosine=True, num_heads=1, batch=1),
    Case("n576-cosine", (24, 24), (24, 24), cosine=True, batch=1),
    Case("n200-tail-of-8-keys", (5, 80), (5, 40), (0, 20), num_heads=1, batch=1),
    Case("n216-tail-of-24-keys", (9, 24), (9, 24), num_heads=1, batch=1),
    Case("n72-last-tile-not-full", (18, 8), (9, 8), (4, 0), num_heads=3, batch=1),
]

#: Precision of q, k and v, and whether an entry of the table has 16 bits.
FORMS = [(torch.float32, False)] + [(d, short) for d in HALF for short in (True, False)]


def places(window):
    """Of every (query, key) in a head's table, as compact_bias.py has it."""
    rows, cols = window
    token = torch.arange(rows * cols)
    y, x = token // cols, token % cols
    query = (x * (2 * rows - 1) + rows - 1 - y) * cols
    return query[:, None] + token[None, :]


def widened(short):
    """16-bit entries as the numbers in [8, 32) that they stand for."""
    return (torch.tensor(8.0).view(torch.int32) + 256 * (short.int() & 0xFFFF)).view(torch.float32)


@pytest.mark.parametrize("window", [(8, 8), (16, 16), (24, 24), (5, 40)], ids=str)
def test_a_table_expands_to_the_dense_bias(window, randn):
    relative = randn((2 * window[0] - 1) * (2 * window[1] - 1), 3).cpu()
    table = pack_compact_bias(relative, window)
    assert table.shape == (3, window[1], (2 * window[0] - 1) * window[1])
    assert table.is_contiguous()
    expanded = table.view(3, -1)[:, places(window)]
    assert torch.equal(expanded, expand_bias_table(relative * LOG2_E, window))


def test_the_card_widens_what_the_interpreter_does():
    """Each byte of a ``prmt`` result is the byte of its two operands that a digit names."""
    from fastswin.ops.window_attention.compact_bias import WIDENING

    found = re.findall(r"prmt.b32 \$(\d), \$2, (0x\w+), 0x(\w{4});", WIDENING.value)
    assert [result for result, *_ in found] == ["0", "1"]
    entries = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    pairs = torch.stack((entries, entries.flip(0)), 1)
    bytes_of = pairs.view(torch.uint8).long()  # little-endian, as registers are
    wide = []
    for _, constant, selector in found:
        others = torch.tensor([int(constant, 16) >> 8 * i & 255 for i in range(4)])
        both = torch.cat((bytes_of, others.expand(len(pairs), 4)), 1)
        digits = [int(digit, 16) for digit in reversed(selector)]
        bits = sum(both[:, digit] << 8 * i for i, digit in enumerate(digits))
        wide.append(bits.to(torch.int32).view(torch.float32))
    assert torch.equal(torch.stack(wide, 1), widened(pairs))


def cpb_like(name, window=(24, 24)):
    """Biases as V2's MLP makes them, ``16 * sigmoid``, of one head, with far and near extremes."""
    y, x = (torch.linspace(-1, 1, 2 * side - 1) for side in window)
    y, x = y[:, None].expand(len(y), len(x)), x[None, :].expand(len(y), len(x))
    far = (y.square() + x.square()).sqrt()
    generator = torch.Generator().manual_seed(1)
    rough = 4 * torch.randn(y.shape, generator=generator)
    logits = {"local": 4 - 20 * far, "far": 20 * far - 12, "down": 40 * y, "rough": rough}
    return 16 * torch.sigmoid(logits[name]).reshape(-1, 1)


@pytest.mark.parametrize("name", ["local", "far", "down", "rough"])
def test_16_bits_keep_probabilities(name):
    """The largest of a row may lie 23 below its head's maximum, where fp16 steps by 2**-6."""
    relative = cpb_like(name)
    table = pack_compact_bias(relative, (24, 24))
    short = shorten_compact_bias(table)
    assert short.dtype == torch.int16
    kept = widened(short)
    off = (kept - kept.max()) - (table - table.max())
    assert off.abs().max() <= 2.0**-12 + 1e-5
    bias = expand_bias_table(relative.double(), (24, 24))
    exact = bias.softmax(-1)
    within = []
    for below in (kept, (table - table.max()).half()):
        got = (below.double().view(1, -1)[:, places((24, 24))] / LOG2_E).softmax(-1)
        within.append(((got - exact).abs() <= 2.0**-11.5 * exact * (1 - exact) + 1e-8).all())
    assert within == [True, False]  # the second is fp16


@pytest.mark.parametrize("bad", [SHORT_RANGE + 0.1, math.inf, math.nan])
def test_a_range_that_16_bits_do_not_hold_stays_as_it_is(bad):
    table = torch.zeros(2, 16, 496)
    table[1, 3, 5] = -bad
    assert shorten_compact_bias(table) is None
    table[1, 3, 5] = -SHORT_RANGE
    assert widened(shorten_compact_bias(table)).min() == 8.0


@pytest.mark.parametrize(("dtype", "short"), FORMS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle(case, dtype, short, randn):
    problem = make_problem(case, randn, dtype)
    with PoisonEmpty():
        out = problem.run(problem.compact_table(short), config=TILES)
    assert_close_to_oracle(out, problem.eager(), problem.oracle(), dtype)


def test_one_window_has_the_bits_of_the_dense_table(randn):
    """Without a shift the fp32 tables hold the same numbers."""
    problem = make_problem(Case("", (8, 24), (8, 24), num_heads=1, batch=1), randn, torch.float16)
    compact = problem.run(problem.compact_table(short=False), config=TILES)
    assert torch.equal(compact, problem.run(problem.dense_table(), config=TILES))


@pytest.mark.parametrize("output", [None, torch.int8], ids=["wide", "int8"])
def test_8_bits(output, randn):
    """The same table beside 8-bit q, k and v and an 8-bit output as the dense one."""
    case = Case("", (8, 16), (8, 16), (0, 8), num_heads=1, batch=1, cosine=True)
    problem = make_problem(case, randn, torch.float16)
    steps = torch.full((4,), 0.03, device=problem.relative.device)
    qkv = (problem.made["qkv"].float() / steps[0]).round().clamp(-127, 127).to(torch.int8)
    problem.made["qkv"] = qkv
    options = {
        "out": None, "config": TILES, "qkv_scale": steps[:3], "out_dtype": output or torch.float16,
        "output_scale": None if output is None else steps[3:],
    }  # fmt: skip
    compact = problem.run(problem.compact_table(short=True), **options)
    dense = problem.run(problem.dense_table(), **options)
    assert compact.dtype == dense.dtype
    apart = (compact.float() - dense.float()).abs().max()
    assert apart <= (1 if output is not None else 2e-3)


def test_what_has_no_compact_form_is_refused(randn):
    problem = make_problem(CASES[0], randn, torch.float16)
    table = problem.compact_table(short=True)
    with pytest.raises(ValueError, match="takes no mask, row statistics or dropout"):
        problem.run(table, row_stats=torch.empty(12, 2, 64, 2), config=TILES)
    with pytest.raises(ValueError, match="needs tiles of keys"):
        problem.run(table)


@pytest.mark.parametrize(
    ("window", "images", "taken"),
    [((24, 24), 1, True), ((16, 16), 1, True), ((12, 24), 1, True), ((24, 12), 1, False),
     ((8, 8), 1, False), ((7, 7), 1, False), ((12, 12), 1, False), ((10, 16), 1, False),
     ((14, 14), 1, False), ((24, 24), 2, False), ((16, 16), 32, False)],
    ids=str,
)  # fmt: skip
def test_windows_that_have_a_compact_table(window, images, taken):
    assert takes_compact_bias(window, images) == taken
    assert not taken or key_tiles(window[0] * window[1]) == ()


#: Stages of SwinV2-B and L with windows of 24 and 16 at batch 1, and a batch of each.
STAGES = [
    Case("w24-l-1", (96, 96), (24, 24), (12, 12), 6, 32, cosine=True, batch=1),
    Case("w24-l-2", (48, 48), (24, 24), (12, 12), 12, 32, cosine=True, batch=1),
    Case("w24-l-3", (24, 24), (24, 24), (0, 0), 24, 32, cosine=True, batch=1),
    Case("w24-b-1-of-8", (96, 96), (24, 24), (12, 12), 4, 32, cosine=True, batch=8),
    Case("w24-padded", (70, 100), (24, 24), (12, 12), 4, 32, cosine=True, batch=2),
    Case("w16-b-1", (64, 64), (16, 16), (8, 8), 4, 32, cosine=True, batch=1),
    Case("w16-t-3", (16, 16), (16, 16), (0, 0), 12, 32, cosine=True, batch=1),
    Case("w16-t-1-of-32", (64, 64), (16, 16), (8, 8), 3, 32, cosine=True, batch=32),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "short"), FORMS, ids=str)
@pytest.mark.parametrize("case", STAGES, ids=str)
def test_stages_of_the_published_models(case, dtype, short, randn):
    """Three runs bitwise, plain and launched ahead, what they write into poisoned outputs."""
    problem = make_problem(case, randn, dtype)
    table = problem.compact_table(short)
    runs = [problem.run(table, pdl=pdl) for pdl in (False, True, True)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert_close_to_oracle(runs[0], problem.eager(), problem.oracle(), dtype)

"""The kernels' own source, their partitions as threads: results, and that no wait is for ever."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gluon_threads import Descriptor, Pointer, run_source

from fastswin.ops.hopper_resident.config import (
    REGISTERS,
    ROWS,
    ResidentMlpConfig,
    ResidentProductConfig,
)
from fastswin.ops.hopper_resident.launch import PART

torch.set_num_threads(1)

EPS = 1e-5

#: M and programs; a program's tiles go round among its groups.
GRIDS = {
    "an edge, groups without tiles": (64 * 5 + 7, 3),
    "many tiles, one program": (64 * 9 + 1, 1),
    "fewer tiles than programs": (70, 4),
    "one row": (1, 1),
    "whole tiles": (64 * 4, 2),
}

#: Weights that a program holds: all of them, or some in turn.
WHOLE, RING, PAIR = "all weights", "a ring of 3", "a ring of 2"


def draw(*shape, seed, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*shape, generator=generator) + 0.1


def poisoned(*shape):
    return torch.full(shape, float("nan"))


def halves(t, rows, columns=None):
    """Descriptors of a matrix in its two column parts, or row parts where ``columns`` are given."""
    if columns is None:
        return [Descriptor(t, [rows, PART]), Descriptor(t, [rows, t.shape[1] - PART])]
    return [Descriptor(t, [PART, columns]), Descriptor(t, [t.shape[0] - PART, columns])]


def run_product(config, grid, N, C, *, bias=True, offset=False):
    """Operands and what the kernel makes of them, launched as launch.py does."""
    from fastswin.ops.hopper_resident import kernel

    M, programs = grid
    x, w = 3 * draw(M, C, seed=1), draw(N, C, seed=2, spread=C**-0.5)
    b, shift = draw(N, seed=3), draw(C, seed=4)
    out = poisoned(M, N)
    arguments = (
        Pointer(b if bias else poisoned(0)), Pointer(shift if offset else poisoned(0)),
        *halves(x, ROWS), *halves(w, config.block_n), Descriptor(out, [ROWS, config.block_n]),
        N, -(-M // ROWS), EPS,
    )  # fmt: skip
    constants = {
        "STEPS": -(-N // config.block_n), "GROUPS": config.groups,
        "REGISTERS": REGISTERS[config.groups], "BUFFERS": config.buffers, "HAS_BIAS": bias,
        "HAS_OFFSET": offset,
    }  # fmt: skip
    run_source(kernel, "_resident_product_kernel", programs, arguments, constants)
    rows = (x + shift if offset else x).double()
    expected = F.layer_norm(rows, (C,), eps=EPS) @ w.double().T
    return out, (expected + b if bias else expected).float()


def run_mlp(config, grid, hidden, C, *, post_norm=False, offset=False, held=WHOLE, in_place=False):
    """What the kernel makes of an MLP's operands, launched as launch.py does, and of eager."""
    from fastswin.ops.hopper_resident import kernel

    M, programs = grid
    x, fc1 = 2 * draw(M, C, seed=1), draw(hidden, C, seed=2, spread=C**-0.5)
    fc2, b1 = draw(C, hidden, seed=3, spread=hidden**-0.5), draw(hidden, seed=4)
    b2, gamma, beta, shift = (draw(C, seed=seed) for seed in (5, 6, 7, 8))
    rows = (x + shift if offset else x).double()
    out = x if in_place else poisoned(M, C)
    steps = hidden // config.block_h
    stages = {WHOLE: steps, RING: 3, PAIR: 2}[held]
    arguments = (
        Pointer(b1), Pointer(b2), Pointer(gamma if post_norm else poisoned(0)),
        Pointer(beta if post_norm else poisoned(0)), Pointer(shift if offset else poisoned(0)),
        *halves(x, ROWS), *halves(fc1, config.block_h), *halves(fc2, None, config.block_h),
        *halves(out, ROWS), -(-M // ROWS), EPS,
    )  # fmt: skip
    constants = {
        "STEPS": steps, "STAGES": stages, "GROUPS": config.groups,
        "REGISTERS": REGISTERS[config.groups], "POST_NORM": post_norm, "HAS_OFFSET": offset,
    }  # fmt: skip
    run_source(kernel, "_resident_mlp_kernel", programs, arguments, constants)
    h = rows if post_norm else F.layer_norm(rows, (C,), eps=EPS)
    h = F.gelu(h @ fc1.double().T + b1) @ fc2.double().T + b2
    if post_norm:
        h = F.layer_norm(h, (C,), gamma.double(), beta.double(), EPS)
    return out, (rows + h).float()


def assert_same(found):
    actual, expected = found
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("buffers", [1, 2, 3], ids="{} buffers".format)
@pytest.mark.parametrize("groups", [3, 4], ids="{} groups".format)
def test_product(groups, buffers, grid):
    """168 columns are five whole steps of 32 and one that begins early."""
    assert_same(run_product(ResidentProductConfig(32, groups, buffers), grid, 168, 96))


@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("N", "C"), [(104, 128), (64, 128), (288, 96)], ids=str)
def test_product_forms(N, C, bias, offset):
    """A last step that begins early, one step, and Swin-T's qkv."""
    grid = GRIDS["an edge, groups without tiles"]
    assert_same(run_product(ResidentProductConfig(), grid, N, C, bias=bias, offset=offset))


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("post_norm", [False, True], ids=["norm first", "norm behind"])
@pytest.mark.parametrize("held", [WHOLE, RING, PAIR])
def test_mlp(held, post_norm, grid):
    config = ResidentMlpConfig(32)
    assert_same(run_mlp(config, grid, 160, 96, post_norm=post_norm, held=held))


@pytest.mark.parametrize("offset", [False, True], ids=["", "offset"])
@pytest.mark.parametrize("post_norm", [False, True], ids=["norm first", "norm behind"])
@pytest.mark.parametrize(("C", "block_h"), [(96, 32), (96, 64), (128, 32)])
def test_mlp_forms(C, block_h, post_norm, offset):
    config, grid = ResidentMlpConfig(block_h), GRIDS["an edge, groups without tiles"]
    assert_same(run_mlp(config, grid, 256, C, post_norm=post_norm, offset=offset))


@pytest.mark.parametrize("held", [WHOLE, PAIR])
@pytest.mark.parametrize("post_norm", [False, True], ids=["norm first", "norm behind"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_mlp_in_place(grid, post_norm, held):
    """Norm behind, rows are read a second time for the residual: before they are overwritten."""
    config = ResidentMlpConfig(32)
    assert_same(
        run_mlp(config, grid, 128, 96, post_norm=post_norm, offset=True, held=held, in_place=True)
    )


def test_one_hidden_step():
    """Nothing follows the first step: a ring has nothing to do."""
    assert_same(run_mlp(ResidentMlpConfig(64), (200, 2), 64, 96))


def test_large_offsets_do_not_cancel():
    """The mean is taken off before squares are summed: rows around 1000 keep their variance."""
    from fastswin.ops.hopper_resident import kernel

    x, w = draw(64, 96, seed=1) + 1000, torch.eye(96)
    out = poisoned(64, 96)
    arguments = (
        Pointer(poisoned(0)), Pointer(poisoned(0)), *halves(x, ROWS), *halves(w, 32),
        Descriptor(out, [ROWS, 32]), 96, 1, EPS,
    )  # fmt: skip
    constants = {"STEPS": 3, "GROUPS": 3, "REGISTERS": 160, "BUFFERS": 1, "HAS_BIAS": False,
                 "HAS_OFFSET": False}  # fmt: skip
    run_source(kernel, "_resident_product_kernel", 1, arguments, constants)
    expected = F.layer_norm(x.double(), (96,), eps=EPS).float()
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)

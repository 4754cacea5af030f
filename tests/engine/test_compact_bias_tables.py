"""Compact bias tables in the engine: which blocks hold them, how many bytes, and the answers."""

from __future__ import annotations

import pytest
import torch
from engine_cases import check_plan_in_fp16, images_like, largest_difference, tiny
from engine_gpu_cases import check_named_model, eager_of

from fastswin.engine import operators
from fastswin.engine.bind import bind
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.ops.window_attention import config as attention_config

CPU = torch.device("cpu")
HALF, FP32 = PRECISIONS["fp16"], PRECISIONS["fp32"]

#: A map of four shifted windows, then of one.
TWO_STAGES = {"num_heads": (1, 2), "depths": (2, 1)}


def long_windows(window, version=2):
    side = 8 * window
    return tiny(version, image_size=(side, side), window_size=window, **TWO_STAGES)


def bound_blocks(model, precision, images=1):
    weights = prepare(model, CPU, precision.dtype)
    plan = make_plan(model.config, images, model.config.image_size, CPU, precision, "triton")
    bind(plan, weights, precision)
    return plan, [block for stage in weights.stages for block in stage]


@pytest.mark.parametrize("window", [16, 24])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("precision", "stored"), [(HALF, torch.int16), (FP32, torch.float32)], ids=["fp16", "fp32"]
)
def test_blocks_of_long_windows_hold_one_compact_table(version, window, precision, stored):
    plan, blocks = bound_blocks(long_windows(window, version), precision)
    assert {stage.attention for stage in plan.stages} == {"triton"}
    assert [block.shifted for block in blocks] == [False, True, False]
    for block, heads in zip(blocks, (1, 1, 2), strict=True):
        assert block.tables == {}
        table = block.compact_table
        assert table.dtype == stored
        assert table.is_contiguous()
        assert table.numel() == heads * (2 * window - 1) * window**2
        for shift in ((0, 0), (window // 2,) * 2):
            assert block.attention_table(shift, precision.dtype, compact=True) is table
        dense = block.bias_table(plan.stages[0].shift_size, precision.dtype)
        assert len(dense) == 4  # kinds of window
        assert dense[0].numel() // table.numel() == {16: 8, 24: 12}[window]


@pytest.mark.parametrize("window", [7, 8, 12])
def test_short_windows_hold_dense_tables(window):
    plan, blocks = bound_blocks(long_windows(window), HALF)
    assert not any(stage.compact_bias or "bias" in stage.reasons for stage in plan.stages)
    for block in blocks:
        assert block.compact_table is None
        assert {table.dtype for table in block.tables.values()} == {torch.float16}


@pytest.mark.parametrize(("images", "compact"), [(1, True), (2, False)], ids=str)
def test_batches_that_find_dense_tables_in_l2_read_those(images, compact):
    plan, blocks = bound_blocks(long_windows(16), HALF, images)
    assert [stage.compact_bias for stage in plan.stages] == [compact] * 2
    assert [stage.reasons.get("bias") for stage in plan.stages] == [
        "compact tables, an entry for each distance of rows" if compact else None
    ] * 2
    assert [block.compact_table is not None for block in blocks] == [compact] * 3
    assert [len(block.tables) for block in blocks] == [1 - compact] * 3


def test_one_constant_gives_dense_tables_back(monkeypatch):
    monkeypatch.setattr(attention_config, "MIN_COMPACT_TOKENS", 1 << 30)
    for block in bound_blocks(long_windows(16), HALF)[1]:
        assert block.compact_table is None
        assert len(block.tables) == 1


def test_a_range_that_16_bits_do_not_hold_is_fp32():
    block = prepare(long_windows(16), CPU, torch.float16).stages[0][0]
    block.relative_bias[3] = -20.0
    assert block.attention_table((0, 0), torch.float16, compact=True).dtype == torch.float32


@pytest.mark.parametrize("version", [1, 2])
def test_answers_as_the_model_does(version):
    model = long_windows(16, version)
    plan = make_plan(model.config, 1, model.config.image_size, CPU, HALF, "triton")
    check_plan_in_fp16(model, plan, operators)


def test_the_same_answers_as_on_dense_tables(monkeypatch):
    """In fp32 both hold the same numbers, but the shift mask is added in another place."""
    from fastswin.engine.forward import Forward

    model = long_windows(16)
    images, found = images_like(model, 1), []
    for fewest in (attention_config.MIN_COMPACT_TOKENS, 1 << 30):
        monkeypatch.setattr(attention_config, "MIN_COMPACT_TOKENS", fewest)
        weights = prepare(model, CPU, torch.float32)
        plan = make_plan(model.config, 1, model.config.image_size, CPU, FP32, "triton")
        forward = Forward(model.config, weights, FP32, operators)
        found.append(forward.logits(images, bind(plan, weights, FP32)))
    assert largest_difference(*found) < 1e-5


LONG_WINDOWS = [
    "swinv2_tiny_window16_256",
    "swinv2_base_window16_256",
    "swinv2_base_window12to24_192to384",
    "swinv2_large_window12to24_192to384",
]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", LONG_WINDOWS)
def test_whole_models_on_the_card(name, precision):
    check_named_model(
        name, 1, precision, lambda plan: [s.attention for s in plan.stages[:3]] == ["triton"] * 3
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "fp32", "tf32"])
def test_compact_and_dense_tables_agree_on_the_card(precision, monkeypatch):
    """Three runs bitwise each, close to one another."""
    model = tiny(
        2, image_size=(192, 384), window_size=24, embed_dim=64, num_heads=(2, 4), depths=(2, 2)
    ).cuda()
    images, found = images_like(model, 1).cuda(), []
    for fewest in (attention_config.MIN_COMPACT_TOKENS, 1 << 30):
        monkeypatch.setattr(attention_config, "MIN_COMPACT_TOKENS", fewest)
        engine = eager_of(model, precision)
        runs = [engine(images).clone() for _ in range(3)]
        assert all(torch.equal(runs[0], other) for other in runs[1:])
        found.append(runs[0])
    largest = found[1].double().abs().max().item()
    assert largest_difference(*found) <= {"fp16": 1e-2, "fp32": 1e-5, "tf32": 5e-3}[
        precision
    ] * max(1.0, largest)

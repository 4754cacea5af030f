"""Launch arithmetic and refusals of the Hopper product, without a card."""

from __future__ import annotations

import pytest
import torch

from fastswin import ops
from fastswin.ops.hopper_gemm import config as hopper
from fastswin.ops.hopper_gemm.config import DEFAULT_BACKWARD, DEFAULT_CONFIG, HopperGemmConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "tiles", "programs", "steps", "columns"),
    [
        ((6272, 1536, 384), 588, 132, 6, 12),
        ((100, 128, 64), 1, 1, 1, 1),
        ((129, 136, 72), 4, 4, 2, 2),
        ((0, 128, 64), 0, 0, 1, 1),
        ((133 * 128, 128, 192), 133, 132, 3, 1),
    ],
    ids=str,
)
def test_schedule(shape, tiles, programs, steps, columns):
    plan = hopper.schedule(*shape, DEFAULT_CONFIG, 132)
    assert plan == hopper.Schedule(tiles, programs, steps, columns)


@pytest.mark.parametrize(
    ("shape", "tiles", "rounds"),
    [
        ((6272, 1536, 384), 528 + 120, 4),  # 60 tiles left, 120 of 132 programs have half a one
        ((133 * 128, 128, 192), 132 + 2, 1),
        ((198 * 128, 128, 192), 132 + 132, 1),
        ((199 * 128, 128, 192), 199, 0),  # two halves for some: no gain
        ((264 * 128, 128, 192), 264, 0),  # nothing left
        ((100, 128, 64), 1, 0),
        ((0, 128, 64), 0, 0),
    ],
    ids=str,
)
def test_halves(shape, tiles, rounds):
    plan = hopper.schedule(*shape, DEFAULT_CONFIG, 132, halve=True)
    assert (plan.tiles, plan.rounds) == (tiles, rounds)
    whole = hopper.schedule(*shape, DEFAULT_CONFIG, 132)
    assert (plan.programs, plan.columns) == (whole.programs, whole.columns)


@pytest.mark.parametrize(
    ("config", "form", "reason"),
    [
        (DEFAULT_CONFIG, "linear", None),
        (DEFAULT_CONFIG, "training", None),
        (DEFAULT_BACKWARD, "backward", None),
        (DEFAULT_CONFIG, "backward", "3 buffers"),
        (HopperGemmConfig(128, 128, 64, stages=6), "linear", "shared memory"),
        (HopperGemmConfig(64, 128, 64, stages=4), "linear", "multiple of 128"),
        (HopperGemmConfig(128, 128, 64, stages=4, groups=3), "linear", "3 of 4, got 3 of 8"),
    ],
    ids=str,
)
def test_what_fits_a_program(config, form, reason):
    blocker = hopper.config_blocker(config, form, 2)
    assert blocker is None if reason is None else reason in blocker


def test_shared_memory_is_a_ring_and_the_results_of_each_group():
    operands, results = 5 * (128 + 128) * 64 * 2, 2 * 2 * 128 * 64 * 2
    assert DEFAULT_CONFIG.shared_bytes(2) == operands + results


@pytest.mark.parametrize(("N", "K"), [(100, 64), (64, 100), (0, 64)], ids=str)
def test_rows_that_the_copy_engine_refuses(N, K):
    assert "multiple of 8" in hopper.shape_blocker(N, K, 2)


def test_a_cpu_is_refused_by_name():
    assert "GPU" in hopper.why_no_hopper_gemm(CPU, torch.float16, 64, 64)


def test_an_explicit_choice_says_why_it_cannot_run():
    x, w = torch.randn(4, 64, dtype=torch.float16), torch.randn(64, 64, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="Hopper product"):
        ops.linear(x, w, impl="triton", config=DEFAULT_CONFIG)


def test_measured_tiles_fit_their_shapes():
    for (form, _), config in hopper.MEASURED.items():
        assert hopper.config_blocker(config, form, 2) is None


@pytest.fixture
def hopper_card(monkeypatch):
    """A GPU of compute capability 9.0, as far as choices go."""
    monkeypatch.setattr(hopper, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(hopper, "multiprocessor_count", lambda device: 132)
    monkeypatch.setattr(hopper, "gluon_blocker", lambda: None)
    return torch.device("cuda", 0)


def test_measured_shapes_are_taken_and_others_are_not(hopper_card, monkeypatch):
    monkeypatch.setattr(hopper, "CHOSEN", {("linear", 384): DEFAULT_CONFIG})
    half = torch.float16
    assert hopper.measured_config("linear", 6272, 1536, 384, half, hopper_card) == DEFAULT_CONFIG
    assert hopper.measured_config("training", 6272, 1536, 384, half, hopper_card) is None
    assert hopper.measured_config("linear", 6272, 1536, 768, half, hopper_card) is None
    assert hopper.measured_config("linear", 6272, 1536, 384, torch.float32, hopper_card) is None
    # 156 tiles: a round and 48 halves; 208 tiles: one round and no second for each
    assert hopper.measured_config("linear", 1568, 1536, 384, half, hopper_card) == DEFAULT_CONFIG
    assert hopper.measured_config("linear", 1568, 2048, 384, half, hopper_card) is None
    assert "products" in hopper.hopper_reason(6272, 1536, 384, half, hopper_card)["fc1"]


def test_few_rows_have_tiles_of_their_own(hopper_card):
    case = (3072, 768, torch.float16, hopper_card)
    assert hopper.measured_config("linear", 2048, *case) == DEFAULT_CONFIG
    assert hopper.measured_config("linear", 2049, *case) == hopper.PLAIN_CONFIG
    for (form, K), (_, config) in hopper.FEW_ROWS.items():
        assert (form, K) in hopper.MEASURED
        assert hopper.config_blocker(config, form, 2) is None


def test_a_plain_product_needs_two_tiles_for_every_program(hopper_card):
    half = torch.float16
    taken = hopper.measured_config("plain", 6272, 1152, 384, half, hopper_card)
    assert taken == hopper.PLAIN_CONFIG
    assert hopper.measured_config("plain", 1568, 1536, 512, half, hopper_card) is None  # 156 tiles
    assert hopper.measured_config("plain", 100352, 288, 96, half, hopper_card) is None


def test_without_gluon_the_report_says_so(hopper_card, monkeypatch):
    monkeypatch.setattr(hopper, "CHOSEN", {("linear", 384): DEFAULT_CONFIG})
    monkeypatch.setattr(hopper, "gluon_blocker", lambda: "this Triton lacks Gluon for Hopper: x")
    case = (6272, 1536, 384, torch.float16, hopper_card)
    assert hopper.measured_config("linear", *case) is None
    assert hopper.hopper_reason(*case) == {
        "fc1": "our plain GEMM: this Triton lacks Gluon for Hopper: x"
    }


def test_other_generations_are_refused_by_name(hopper_card, monkeypatch):
    monkeypatch.setattr(hopper, "device_capability", lambda device: (10, 0))
    assert "9.0" in hopper.why_no_hopper_gemm(hopper_card, torch.float16, 64, 64)

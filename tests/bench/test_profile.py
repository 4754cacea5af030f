"""The profiler: work counted per call, sums that add up, traces cut at their markers."""

from __future__ import annotations

import json

import pytest
import torch

from fastswin.bench.call_cost import call_bytes, call_flops
from fastswin.bench.profile import HEADER, profile_model, summary, table_rows
from fastswin.bench.roofline import Ceilings, swin_flops
from fastswin.bench.trace import MARKER, Kernel, split_trace
from fastswin.engine import Engine
from fastswin.models import SwinConfig, SwinTransformer

CONFIG = SwinConfig(
    image_size=(32, 48), embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5
)
CEILINGS = Ceilings(copy_tbs=0.01, gemm_tflops={"fp32": 0.1})


def small_model(version=1):
    torch.manual_seed(0)
    config = CONFIG if version == 1 else SwinConfig(
        version=2, image_size=(32, 48), embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=4, num_classes=5,
    )  # fmt: skip
    return SwinTransformer(config).eval()


@pytest.fixture(scope="module")
def profile():
    return profile_model(
        small_model(), "fp32", 2, device="cpu", seconds=0.002, ceilings=CEILINGS, name="small"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_flops_add_up_to_the_models(version):
    model = small_model(version)
    engine = Engine(model, "fp32", device="cpu", backend="torch")
    calls = engine.calls(torch.randn(2, 3, 32, 48))
    total = sum(call.count * call_flops(call) for call in calls)
    # 8x12 tokens are whole windows, 4x6 are padded to 4x8 and attention computes all of them
    assert total == swin_flops(model.config, 2)


def test_bytes_are_every_tensor_once():
    engine = Engine(small_model(), "fp32", device="cpu", backend="torch")
    calls = {(c.stage, c.layer): c for c in engine.calls(torch.randn(2, 3, 32, 48))}
    tokens = 2 * 8 * 12
    assert call_bytes(calls[0, "qkv"]) == 4 * (tokens * 24 + 72 * 24 + 72 + tokens * 72)
    assert call_bytes(calls[0, "add"]) == 4 * 3 * tokens * 24  # in place: both read, one written
    assert call_flops(calls[0, "add"]) == 0
    assert call_flops(calls[0, "qkv"]) == 2 * tokens * 24 * 72


def test_rows_tell_time_work_and_share(profile):
    assert sum(row.share_percent for row in profile.rows) == pytest.approx(100)
    assert profile.sum_ms == pytest.approx(sum(row.total_us for row in profile.rows) / 1e3)
    for row in profile.rows:
        assert row.total_us == pytest.approx(row.calls * row.latency_us)
        floor_us = max(row.flops / 0.1e6, row.bytes / 0.01e6)
        assert row.roofline_us == pytest.approx(floor_us)
        assert row.roofline_percent == pytest.approx(100 * floor_us / row.latency_us)
    layers = [(row.stage, row.layer) for row in profile.rows]
    assert layers[0] == (None, "embed")
    assert layers[-2:] == [(None, "pool"), (None, "head")]
    assert profile.measured_ms > 0
    assert (profile.method, profile.note, profile.graph) == ("loop", "", False)


def test_a_profile_is_json_and_text(profile):
    values = json.loads(json.dumps(profile.to_dict()))
    assert values["model"] == "small"
    assert {"flops", "bytes", "latency_us", "share_percent"} <= set(values["rows"][0])
    assert all(len(cells) == len(HEADER) for cells in table_rows(profile))
    line = summary(profile)
    assert line.startswith(f"sum {profile.sum_ms:.4g} ms, measured {profile.measured_ms:.4g} ms")
    assert "(no graph); times by loop; copy 0.01 TB/s" in line


def test_bad_arguments_are_named():
    for arguments, message in (
        ((small_model(), "fp32", 0), "batch must be at least 1"),
        (("swin_tny", "fp32", 1), "unknown model name"),
    ):
        with pytest.raises(ValueError, match=message):
            profile_model(*arguments, device="cpu")
    with pytest.raises(ValueError, match="method must be one of"):
        profile_model(small_model(), "fp32", 1, device="cpu", method="magic")
    with pytest.raises(RuntimeError, match="no trace"):
        profile_model(
            small_model(), "fp32", 1, device="cpu", method="trace", seconds=0.001,
            ceilings=CEILINGS,
        )  # fmt: skip


def kernels_of(*names_and_us):
    """Kernels one after another; "|" is a marker."""
    found, now = [], 0.0
    for name, us in names_and_us:
        found.append(Kernel(f"void {MARKER}(long)" if name == "|" else name, now, us))
        now += us
    return found


def test_a_trace_is_cut_at_its_markers():
    rounds = [
        ("|", 9), ("gemm", 5.0), ("splitk", 1.0), ("|", 9), ("norm", 2.0),
        ("|", 9), ("gemm", 7.0), ("splitk", 1.0), ("|", 9), ("norm", 2.5),
        ("|", 9), ("gemm", 5.5), ("splitk", 1.0), ("|", 9), ("norm", 9.0),
    ]  # fmt: skip
    traced = split_trace(list(reversed(kernels_of(("warm-up", 3.0), *rounds))), calls=2)
    assert [t.kernels for t in traced] == [("gemm", "splitk"), ("norm",)]
    assert [t.latency_us for t in traced] == [6.5, 2.5]


@pytest.mark.parametrize(
    "rounds",
    [[], [("|", 9), ("gemm", 5.0)], [("|", 9), ("gemm", 5.0), ("|", 9)]],
    ids=["empty", "cut-off", "call-without-kernel"],
)
def test_a_trace_that_lacks_kernels_is_refused(rounds):
    with pytest.raises(RuntimeError, match="expected rounds of 2"):
        split_trace(kernels_of(*rounds), calls=2)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["trace", "loop"])
def test_a_forward_on_the_card_adds_up(method):
    profile = profile_model("swin_tiny_patch4_window7_224", "fp16", 32, method=method)
    assert profile.method == method
    assert 0.7 < profile.sum_ms / profile.measured_ms < 1.5
    assert all(row.roofline_percent < 130 for row in profile.rows if row.bytes > 30e6)
    if method == "trace":
        assert all(row.kernels for row in profile.rows)

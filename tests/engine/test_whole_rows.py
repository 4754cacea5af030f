"""Products onto the stream with the LayerNorm behind them: chosen by data, same answers."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from engine_cases import images_like, plan_limits, tiny
from quantized_cases import PER_TOKEN, make_case, relative_rms

from fastswin import quant
from fastswin.engine import Engine, whole_rows
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.check import check_finite
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.whole_rows import RowsRange, default_whole_rows
from fastswin.models import find_variant
from fastswin.ops.linear_norm.config import LinearNormConfig, linear_norm_blocker
from fastswin.quant import QuantizedSwin

CPU, HALF = torch.device("cpu"), PRECISIONS["fp16"]
SMALL = {"depths": (2, 1), "image_size": (12, 16), "window_size": 3}
TILES = RowsRange(config=LinearNormConfig(16, 32, 32, 4, 2))


def table(*formats: str, layers: tuple[str, ...] = ("proj", "fc2"), **ranges) -> dict:
    """Both layers of the tiny model's stages, 32 and 64 channels."""
    found = (RowsRange(**ranges, config=TILES.config),)
    return {(layer, C, *formats): found for layer in layers for C in (32, 64)}


@pytest.fixture(scope="module")
def case():
    return make_case(1, **SMALL, embed_dim=32, num_heads=(1, 2))


@pytest.fixture
def apart():
    """LayerNorm and products of the MLP are calls of their own, however small the model."""
    with plan_limits(fused_qkv=False, mlp_channels=0, mlp_min_tokens=1):
        yield


@pytest.mark.parametrize("layers", [("proj",), ("fc2",), ("proj", "fc2")], ids="+".join)
def test_answers_as_the_model_does(layers, apart):
    """The stage's first norm and those behind the library's products remain; so do no biases."""
    model = tiny(1, **SMALL)
    config, images = model.config, images_like(model, 1)
    plan = make_plan(
        config, 1, config.image_size, CPU, HALF, "triton",
        whole_rows=table("wide", "wide", layers=layers),
    )  # fmt: skip
    proj, mlp = ("rows" if layer in layers else "library" for layer in ("proj", "fc2"))
    assert [(s.proj, s.mlp) for s in plan.stages] == [(proj, mlp)] * 2
    assert "LayerNorm behind it" in plan.stages[0].reasons[layers[0]]
    with torch.no_grad():
        weights = prepare(model, CPU, torch.float16)
        forward, bound = Forward(config, weights, HALF), bind(plan, weights, HALF)
        quiet = record_calls(forward, bound, images.half(), execute=False)
        if len(layers) == 2:
            truth = model(images)
            eager = copy.deepcopy(model).half()(images.half()).float()
            logits = forward.logits(images.half(), bound).float()
            assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    rows: Counter = Counter()
    for call in quiet:
        fused = call.name == "ops.linear_add_layer_norm"
        rows[call.layer if fused else call.name] += call.count
    blocks, inner = 3, 1
    assert rows["proj"] == (blocks if "proj" in layers else 0)
    assert rows["fc2"] == (inner if "fc2" in layers else 0)
    assert rows["ops.layer_norm"] == 2 * blocks - rows["proj"] - rows["fc2"]
    assert [offsets.norm2 is None for offsets in bound.offsets[0]] == ["proj" in layers] * 2


def test_one_block_after_another_normalises_by_itself(monkeypatch, apart):
    """``check`` runs blocks alone: what a kernel has normalised for the next one is not kept."""
    model = tiny(1, **SMALL)
    monkeypatch.setattr(whole_rows, "WHOLE_ROWS", table("wide", "wide"))
    engine = Engine(model, "fp16", device="cpu", impl="triton")
    assert "proj rows, mlp rows" in str(engine.report(1, SMALL["image_size"]))
    images = images_like(model, 1).half()
    bound = engine._plans.bound(1, SMALL["image_size"])
    with torch.no_grad():
        last = check_finite(engine._forward, images, bound)[-1]
        truth = model(images.float())
    assert last.max_abs == pytest.approx(truth.abs().max().item(), rel=5e-3)


@pytest.mark.parametrize("scheme", ["int8", "per-token", "proj wide"])
def test_8_bits_in_and_out(scheme, case, monkeypatch, apart):
    schemes = {
        "int8": quant.PRESETS["int8"],
        "per-token": PER_TOKEN.override({"*.proj": quant.WIDE}),
        "proj wide": quant.PRESETS["int8"].override({"*.proj": quant.WIDE}),
    }
    calibration = case.calibration(schemes[scheme])
    product = "int8" if scheme == "int8" else "wide"
    chosen = table(product, "int8", layers=("proj",)) | table("int8", "int8", layers=("fc2",))
    monkeypatch.setattr(whole_rows, "WHOLE_ROWS", chosen)
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", mix="scheme", calibration=calibration,
        wide_dtype=torch.float16,
    )  # fmt: skip
    size = SMALL["image_size"]
    assert "proj rows, mlp rows" in str(engine.report(1, size))
    with torch.no_grad():
        bound = engine._plans.bound(1, size)
        calls = record_calls(engine._forward, bound, case.images[:1].half(), execute=False)
    rows = [call for call in calls if call.name == "ops.linear_add_layer_norm"]
    assert {call.layer for call in rows} == {"proj", "fc2"}
    for call in rows:
        assert call.kwargs["per_token"] == (scheme == "per-token")
        assert call.kwargs["out_dtype"] == torch.int8
        assert (call.kwargs["scale"] is None) == (call.layer == "proj" and product == "wide")
    if scheme == "int8":  # proj's int8 sums and fc2's, of one image
        error = relative_rms(
            QuantizedSwin(case.model, calibration)(case.images[:1]), case.exact[:1]
        )
        assert relative_rms(engine(case.images[:1]), case.exact[:1]) <= 1.5 * error


def test_a_product_stored_in_8_bits_keeps_its_own_kernel(case, monkeypatch, apart):
    monkeypatch.setattr(whole_rows, "WHOLE_ROWS", table("int8", "int8"))
    engine = Engine(
        case.model, "int8_mode1", device="cpu", impl="triton", mix="scheme",
        calibration=case.calibration("int8_mode1"), wide_dtype=torch.float16,
    )  # fmt: skip
    stage = engine.report(1, SMALL["image_size"]).plan.stages[0]
    assert (stage.proj, stage.mlp) == ("library", "library")
    assert "store it in 8 bits" in stage.reasons["proj by rows"]


def test_ranges_and_cards_decide():
    swin = find_variant("swin_tiny_patch4_window7_224")
    rows = {("proj", 384, "wide", "wide"): (RowsRange(6000, 7000),)}

    def words(batch: int, chosen: dict, config=swin) -> list[str]:
        plan = make_plan(
            config, batch, config.image_size, CPU, HALF, "triton", fused_attention={},
            whole_rows=chosen,
        )  # fmt: skip
        return [stage.proj for stage in plan.stages]

    assert words(32, rows) == ["library", "library", "rows", "library"]
    assert words(64, rows) == ["library"] * 4
    deep = {("proj", 384, "wide", "wide"): (RowsRange(config=LinearNormConfig(64, 64, 64, 8, 9)),)}
    plan = make_plan(
        swin, 32, swin.image_size, CPU, HALF, "triton", fused_attention={}, whole_rows=deep
    )
    assert "in 1 to 4 parts" in plan.stages[2].reasons["proj by rows"]
    v2 = find_variant("swinv2_tiny_window8_256")
    assert "rows" not in words(32, rows | {("proj", 384, "wide", "wide"): (RowsRange(),)}, v2)
    assert default_whole_rows(CPU) is whole_rows.WHOLE_ROWS


def test_what_was_measured_fits_the_card_it_was_measured_on():
    for (layer, C, product, _), ranges in (whole_rows.MEASURED | whole_rows.WHOLE_ROWS).items():
        depth, itemsize = (C if layer == "proj" else 4 * C), (2 if product == "wide" else 1)
        for found in ranges:
            assert linear_norm_blocker(C, depth, itemsize, (9, 0), found.config) is None

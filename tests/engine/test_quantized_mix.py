"""Mixes of 8-bit kernels that engines take by shape, on those kernels in the interpreter."""

from __future__ import annotations

import dataclasses

import torch
from quantized_cases import check_layers, make_case, relative_rms

from fastswin import quant
from fastswin.engine import Engine
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.quantized import mix
from fastswin.ops.quantized_linear.ordering import restore_rows
from fastswin.ops.split_k.config import SplitKConfig
from fastswin.quant import QuantizedSwin


def test_the_mlp_in_one_kernel(monkeypatch):
    """Its 8-bit kernel in the interpreter; proj's bias is pending before it and gone behind."""
    everywhere = {"int8": {192: 0}}
    monkeypatch.setattr(mix, "FUSED_MLP_ROWS", everywhere)
    case = make_case(1, depths=(1, 1), image_size=(16, 24), embed_dim=32, num_heads=(1, 2))
    calibration = case.calibration("int8")
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", calibration=calibration,
        wide_dtype=torch.float16,
    )  # fmt: skip
    reference = QuantizedSwin(case.model, calibration)
    error = relative_rms(reference(case.images), case.exact)
    assert relative_rms(engine(case.images), case.exact) <= 1.5 * error
    fused = [c for c in engine.calls(case.images) if c.name == "ops.quantized_mlp"]
    assert [call.layer for call in fused] == ["mlp", "mlp"]
    for number, call in enumerate(fused):
        fc1 = reference.linears[f"layers.{number}.blocks.0.mlp.fc1"]
        assert torch.equal(restore_rows(call.args[1]), fc1.weight.to(torch.int8))
        own = {**call.kwargs, "out": None}
        wanted = call.function(*call.args, **{**own, "impl": "reference"}).float()
        assert relative_rms(call.function(*call.args, **own), wanted) <= 2e-3
    offsets = engine._plans.bound(3, (16, 24)).offsets
    assert offsets[0][0].norm2 is not None
    assert engine._plans.bound(3, (16, 24)).stage_end == (None, None)
    assert "in one kernel" in str(engine.report(3))


def test_few_rows_cut_fc2_along_k():
    """8-bit slices, joined by the LayerNorm that rounds for the next qkv, or alone at the end."""
    case = make_case(1, image_size=(16, 24), embed_dim=32, num_heads=(1, 2))
    calibration = case.calibration("int8")
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", calibration=calibration, mix="scheme",
        wide_dtype=torch.float16,
    )  # fmt: skip
    images = case.images[:1].half()
    words = {"mlp": "split-k", "launch": {"fc2": SplitKConfig(2, 16, 32, 4)}}
    plan = engine._plans.bound(1, (16, 24)).plan
    stages = tuple(dataclasses.replace(stage, **words) for stage in plan.stages)
    forward = engine._forward
    bound = bind(dataclasses.replace(plan, stages=stages), forward.weights, forward.precision)
    with torch.no_grad():
        logits = forward.logits(images, bound)
        names = [call.name for call in record_calls(forward, bound, images)]
    assert names.count("ops.split_k_linear") == 2
    assert names.count("ops.add_split_k") == 3
    reference, exact = QuantizedSwin(case.model, calibration)(case.images[:1]), case.exact[:1]
    assert relative_rms(logits, exact) <= 1.5 * relative_rms(reference, exact)


def test_kernels_under_the_interpreter():
    """int8 layers on their kernels, proj in place by the library with its bias pending."""
    case = make_case(1, depths=(1, 1), image_size=(16, 24), num_heads=(1, 2))
    scheme = quant.PRESETS["int8"].override({"*.proj": quant.WIDE})
    calibration = case.calibration(scheme)
    engine = Engine(
        case.model, "int8", device="cpu", impl="triton", mix="scheme", calibration=calibration,
        wide_dtype=torch.float16,
    )  # fmt: skip
    reference = QuantizedSwin(case.model, calibration)
    error = relative_rms(reference(case.images), case.exact)
    assert relative_rms(engine(case.images), case.exact) <= 1.5 * error
    assert check_layers(engine, reference, case.images).keys() >= {"qkv", "fc1", "fc2", "merge"}
    assert "int8 (triton)" in str(engine.report(3))
    assert engine._plans.bound(3, (16, 24)).offsets[0][0].norm2 is not None

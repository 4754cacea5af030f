"""Which layers of real sizes run in 8 bits: plans of an imagined H100, no weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fastswin.engine import stage_choice as planning
from fastswin.engine.fused_attention import FusedRange
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.quantized.library import why_not_library
from fastswin.engine.quantized.plan import quantize_plan
from fastswin.models import find_variant
from fastswin.quant import PRESETS, WIDE, Calibration, LayerRange, LayerScheme

CPU = torch.device("cpu")
TINY, LARGE = "swin_tiny_patch4_window7_224", "swin_large_patch4_window7_224"


def imagined(config, scheme):
    """A calibration that no model was needed for."""
    names = []
    for stage, depth in enumerate(config.depths):
        for block in range(depth):
            names += [
                f"layers.{stage}.blocks.{block}.{layer}"
                for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
            ]
        if stage + 1 < config.num_stages:
            names.append(f"layers.{stage}.downsample.reduction")
    layers = {name: LayerRange(name, scheme.layer(name), 1.0, (), torch.ones(1)) for name in names}
    return Calibration(scheme, layers, "", 1)


def planned(name, batch, scheme="int8", mix="auto", pdl=False, fused_attention=None):
    config = find_variant(name)
    scheme = PRESETS[scheme] if isinstance(scheme, str) else scheme
    multiprocessors = mock.patch.object(planning, "multiprocessor_count", return_value=132)
    with multiprocessors:
        plan = make_plan(
            config, batch, config.image_size, CPU, PRECISIONS["fp16"], "triton", pdl=pdl,
            fused_attention=fused_attention or {},
        )  # fmt: skip
    return quantize_plan(plan, config, imagined(config, scheme), mix)


def formats(plan, stage, block=0):
    return formats_of(plan.stages[stage], block)


def formats_of(stage, block=0):
    found = stage.formats.blocks[block]
    return {name: getattr(found, name).format for name in ("qkv", "proj", "fc1", "fc2")}


def test_swin_tiny_at_batch_32_is_quantised_where_it_pays():
    plan = planned(TINY, 32)
    wide_mlp = {"qkv": "int8", "proj": "wide", "fc1": "wide", "fc2": "wide"}
    assert formats(plan, 0) == wide_mlp
    for stage in (1, 2, 3):
        proj = "int8" if stage == 3 else "wide"
        assert formats(plan, stage) == {"qkv": "int8", "proj": proj, "fc1": "int8", "fc2": "int8"}
    assert plan.stages[0].formats.blocks[0].attention == "int8"
    assert "bring no speed at 100352 rows of 96" in plan.stages[0].reasons["fc1 format"]
    assert "the library is as fast" in plan.stages[2].reasons["proj format"]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_merging_is_8_bit_of_many_rows(scheme):
    def merging(name, batch, **arguments):
        plan = planned(name, batch, scheme, **arguments)
        return [stage.formats.reduction.format for stage in plan.stages[:3]]

    assert merging(LARGE, 32) == [scheme] * 3
    assert merging(LARGE, 8) == [scheme, scheme, "wide"]
    assert merging(TINY, 1, pdl=True) == ["wide"] * 3
    assert merging("swinv2_large_window12_192", 32) == ["wide"] * 3


def test_batch_1_of_swin_tiny_quantises_from_768_channels():
    plan = planned(TINY, 1, pdl=True)
    for stage in (0, 1, 2):
        assert set(formats(plan, stage).values()) == {"wide"}
    assert formats(plan, 3) == {"qkv": "int8", "proj": "wide", "fc1": "int8", "fc2": "int8"}
    assert plan.stages[3].formats.blocks[0].attention == "wide"
    assert "bound by launches" in plan.stages[2].reasons["qkv format"]


def test_batch_1_of_swin_large_quantises_the_weights_that_weigh():
    plan = planned(LARGE, 1, pdl=True)
    assert set(formats(plan, 0).values()) == {"wide"}
    assert formats(plan, 2) == {"qkv": "int8", "proj": "wide", "fc1": "int8", "fc2": "int8"}
    assert set(formats(plan, 3).values()) == {"int8"}


def test_batch_1_of_v2_quantises_where_two_more_launches_pay():
    plan = planned("swinv2_large_window12_192", 1, pdl=True)
    assert [set(formats(plan, stage).values()) for stage in (2, 3)] == [{"wide"}, {"int8"}]


def test_one_kernel_for_the_mlp_where_it_is_fastest():
    tiny, large = planned(TINY, 32), planned(LARGE, 32)
    assert [s.formats.blocks[0].mlp for s in tiny.stages] == ["split", "fused", "split", "split"]
    assert [s.formats.blocks[0].mlp for s in large.stages] == ["fused", "split", "split", "split"]
    assert tiny.stages[1].endings(0) == ("library", "fused")
    assert "slower at 100352 rows of 96" in tiny.stages[0].reasons["fused 8-bit mlp"]
    assert "384 channels exceed 192" in tiny.stages[2].reasons["fused 8-bit mlp"]
    assert "in one kernel" in large.stages[0].formats.lines()[0]
    assert formats(large, 0)["proj"] == "int8"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [(PRESETS["int8_mode1"], "stored in 8 bits"),
     (PRESETS["int8"].override({"*.fc1": LayerScheme(activation="per_token")}), "a step a token"),
     (PRESETS["int8"].override({"*.fc2": WIDE}), "not in one 8-bit format")],
    ids=["mode1", "per-token", "wide-fc2"],
)  # fmt: skip
def test_schemes_that_one_kernel_cannot_run(scheme, reason):
    stage = planned(LARGE, 32, scheme).stages[0]
    assert stage.formats.blocks[0].mlp == "split"
    assert reason in stage.reasons["fused 8-bit mlp"]


@pytest.mark.parametrize("batch", [1, 32])
def test_the_scheme_itself_at_every_batch(batch):
    plan = planned(TINY, batch, mix="scheme", pdl=batch == 1)
    for stage in range(4):
        assert set(formats(plan, stage).values()) == {"int8"}


@pytest.mark.parametrize("form", ["heads", "window"])
def test_an_attention_half_in_one_kernel_is_half_precision(form):
    table = {(1, 96): (FusedRange(form),)}
    stages = planned(TINY, 32, fused_attention=table).stages
    assert set(formats_of(stages[0]).values()) == {"wide"}
    assert stages[0].endings(0)[0] == ("inside" if form == "window" else "library")
    assert "one kernel" in stages[0].reasons["qkv format"]
    assert stages[1].formats.blocks[0].qkv.format == "int8"


@pytest.mark.parametrize(
    ("kind", "rows", "channels", "by_library"),
    [("fc2", 25088, 256, True), ("fc2", 25088, 192, False), ("fc1", 6272, 768, False),
     ("fc1", 1568, 768, True), ("qkv", 6272, 768, False), ("qkv", 1568, 1024, True),
     ("proj", 100352, 128, True), ("proj", 25088, 128, False), ("proj", 100352, 192, False),
     ("proj", 6272, 384, False), ("proj", 1568, 1536, True), ("proj", 784, 1024, False)],
    ids=str,
)  # fmt: skip
def test_fp8_products_that_the_library_takes(kind, rows, channels, by_library):
    """On a CPU the library itself is the reason where speed is none."""
    reason = why_not_library(kind, rows, channels, channels, channels, CPU, torch.float16)
    assert ("our kernel is faster" not in reason) == by_library


def test_proj_of_narrow_stages_with_many_rows():
    base = "swin_base_patch4_window7_224"
    assert formats(planned(base, 32, "fp8"), 0)["proj"] == "fp8"
    assert formats(planned(base, 32), 0)["proj"] == "wide"
    assert [formats(planned(TINY, 32, "fp8"), stage)["proj"] for stage in range(4)] == [
        "wide", "wide", "fp8", "fp8",
    ]  # fmt: skip


def test_overrides_of_single_layers():
    scheme = PRESETS["fp8"].override({"layers.2.blocks.3.*": WIDE})
    plan = planned(LARGE, 32, scheme)
    assert formats(plan, 2, 2) == {"qkv": "fp8", "proj": "fp8", "fc1": "fp8", "fc2": "fp8"}
    assert set(formats(plan, 2, 3).values()) == {"wide"}
    lines = plan.stages[2].formats.lines()
    assert [line.partition(":")[0] for line in lines] == [
        "blocks 0-2", "block 3", "blocks 4-17", "merge",
    ]  # fmt: skip


def test_pending_biases_end_where_8_bits_add_their_own():
    plan = planned(TINY, 32)
    assert plan.stages[0].endings(0) == ("library", "fused")
    assert plan.stages[2].endings(0) == ("library", "quantized")
    everything = planned(TINY, 32, mix="scheme")
    assert everything.stages[2].endings(0) == ("quantized", "quantized")
    half = planned(TINY, 32, PRESETS["int8"].override({"*.fc2": WIDE}), mix="scheme")
    assert half.stages[0].endings(0) == ("quantized", "library")  # not "fused": fc1 is apart

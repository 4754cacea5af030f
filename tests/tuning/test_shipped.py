"""Tables that ship: everything in them can run, and plans take what whole models gained with."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from fastswin.engine.plan import PDL_VALUES, make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.tuned import tuned_gain
from fastswin.models import VARIANTS, find_variant
from fastswin.ops.hopper_gemm.config import chosen_config
from fastswin.tuning.card import H100, Card
from fastswin.tuning.document import card_slug
from fastswin.tuning.table import SHIPPED, TuningTable

PATHS = sorted(SHIPPED.glob("*.json"))


@pytest.fixture(params=PATHS, ids=[path.stem for path in PATHS])
def shipped(request):
    """Document, card and table of one file, as that card would read it."""
    document = json.loads(request.param.read_text(encoding="utf-8"))
    capability = tuple(document["capability"])
    assert capability == H100.capability  # the only shared memory that is known here
    card = Card(document["card"], H100.multiprocessors, capability, H100.shared_bytes)
    assert request.param.stem == card_slug(card.name)
    triton = {row["triton"] for row in document["configs"]}
    assert len(triton) == 1
    return document, card, TuningTable(document, card, triton.pop(), request.param.name)


def plan_of(name, batch, table, precision="fp16"):
    config = find_variant(name)
    H, W = config.map_size(0)
    few = batch * H * W * config.dim(0) <= PDL_VALUES
    return make_plan(
        config, batch, config.image_size, torch.device("cpu"), PRECISIONS[precision], "triton",
        table, few,
    )  # fmt: skip


def chosen_on_the_card(form, M, N, K, dtype, device):
    return chosen_config(form, M, N, K, dtype.itemsize, H100.multiprocessors)


def changed(a, b):
    """Layers of two plans that differ: in their word, or in tiles of their launches."""
    launches = {"qkv": ("qkv",), "mlp": ("mlp", "fc1", "fc2"), "attention": ("attention",)}
    return [
        (one.stage, layer)
        for one, other in zip(a.stages, b.stages, strict=True)
        for layer, names in launches.items()
        if getattr(one, layer) != getattr(other, layer)
        or any(one.launch.get(name) != other.launch.get(name) for name in names)
    ]


def test_a_table_ships():
    assert PATHS


def test_no_row_is_refused(shipped):
    document, _, table = shipped
    assert document["answering_rows_only"]
    assert (table.refused, table.num_unused) == ({}, 0)
    assert table.num_rows == len(document["configs"]) + len(document["choices"]) > 0
    assert {row["verdict"] for row in document["configs"] + document["choices"]} == {"gain"}


def test_models_were_measured_and_none_lost(shipped):
    models = shipped[0]["models"]
    sizes = {(c.version, c.embed_dim, c.depths, c.window_size, c.image_size) for c in (
        find_variant(model["model"]) for model in models)}  # fmt: skip
    assert len(sizes) >= 11
    assert all(model["tuned_ms"] <= 1.004 * model["heuristic_ms"] for model in models)
    assert any(model["tuned_ms"] < 0.99 * model["heuristic_ms"] for model in models)


def test_plans_change_where_models_were_measured_with_changes(shipped, monkeypatch):
    document, _, table = shipped
    extra = []
    for model in document["models"]:
        name, batch = model["model"], model["batch"]
        plain = plan_of(name, batch, None)
        layers = changed(plan_of(name, batch, table), plain)
        with monkeypatch.context() as card:
            card.setattr("fastswin.engine.stage_choice.measured_config", chosen_on_the_card)
            by_heuristics = changed(plan_of(name, batch, None), plain)
        # rows of another model may serve as well; rows that became heuristics are gone
        assert len({*layers, *by_heuristics}) >= model["units"], (name, batch, layers)
        extra.append(len(layers) - model["units"])
        assert "ms by heuristics" in tuned_gain(
            table, find_variant(name), batch, find_variant(name).image_size, "fp16"
        )
    assert sum(extra) <= len(extra) // 2


def test_bf16_takes_what_was_checked(shipped):
    document, _, table = shipped
    for model in document["models"]:
        name, batch = model["model"], model["batch"]
        plain = plan_of(name, batch, None, "bf16")
        half = changed(plan_of(name, batch, table), plan_of(name, batch, None))
        assert set(changed(plan_of(name, batch, table, "bf16"), plain)) <= set(half)
    assert any("bf16" in row["also"] for row in document["configs"])


def test_few_rows_are_untouched_whatever_ships(shipped):
    table = shipped[2]
    for name in ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"):
        stages = plan_of(name, 1, table).stages
        for mine, plain in zip(stages, plan_of(name, 1, None).stages, strict=True):
            reasons = {k: v for k, v in mine.reasons.items() if k != "tuning"}
            assert dataclasses.replace(mine, reasons=reasons) == plain


def test_all_variants_plan_with_it_at_any_batch(shipped):
    table = shipped[2]
    for name, config in VARIANTS.items():
        for batch in (1, 3, 16, 48):
            assert len(plan_of(name, batch, table).stages) == config.num_stages

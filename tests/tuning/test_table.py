"""Tables: what is looked up, what is refused and why, and that looking up measures nothing."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest
import torch

from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.models import SwinConfig, find_variant
from fastswin.ops.hopper_gemm.config import HopperGemmConfig
from fastswin.ops.linear.config import (
    GemmConfig,
    LayerNormLinearConfig,
    OneShotConfig,
)
from fastswin.ops.mlp.config import MlpConfig
from fastswin.ops.window_attention.config import WindowAttentionConfig
from fastswin.tuning.document import (
    TableRefusedError,
    card_slug,
    empty_document,
    format_document,
    merge_rows,
    ranges,
    read_document,
)
from fastswin.tuning.layers import mlp_layer, qkv_layer
from fastswin.tuning.problem import config_from_dict, config_to_dict, make_problem
from fastswin.tuning.table import TuningTable, find_table

TRITON = "3.6.0"
SHAPE = {"C": 96, "hidden": 384, "post_norm": 0}
CONFIG = {"block_m": 64, "block_h": 64, "num_warps": 4, "num_stages": 2, "tma": False}


def config_row(rows=3136, **changes):
    row = {
        "op": "mlp", "dtype": "fp16", "triton": "3.6", "shape": SHAPE, "rows": rows,
        "range": [rows - 100, rows + 100], "config": CONFIG, "shared_bytes": 65536,
        "latency_us": 12.5, "default_us": 13.5, "verdict": "gain",
    }  # fmt: skip
    return row | changes


def choice_row(rows=3136, choice="library", **changes):
    row = {
        "layer": "qkv", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, "post_norm": 0},
        "rows": rows, "range": [rows - 100, rows + 100], "choice": choice,
        "latency_us": {"library": 6.0, "fused": 7.0}, "verdict": "gain",
    }  # fmt: skip
    return row | changes


def table_of(card, *configs, choices=(), triton=TRITON):
    document = empty_document(card) | {"configs": list(configs), "choices": list(choices)}
    return TuningTable(json.loads(json.dumps(document)), card, triton, "test.json")


def mlp(rows, dtype="fp16"):
    return make_problem("mlp", dtype, rows, **SHAPE)


def test_a_row_answers_for_its_range_alone(card):
    table = table_of(card, config_row(3136), config_row(784, config=CONFIG | {"block_m": 32}))
    found = {rows: table.config(mlp(rows)) for rows in (683, 684, 884, 885, 3036, 3236, 3237)}
    assert {rows: c and c.block_m for rows, c in found.items()} == {
        683: None, 684: 32, 884: 32, 885: None, 3036: 64, 3236: 64, 3237: None,
    }  # fmt: skip
    assert table.config(mlp(3136, "bf16")) is None
    assert table.config(make_problem("mlp", "fp16", 3136, C=96, hidden=192, post_norm=0)) is None


def test_choices_tell_form_and_times(card):
    table = table_of(card, choices=[choice_row()])
    assert table.choice(qkv_layer("fp16", 3136, 96, False)) == {
        "choice": "library", "latency_us": {"library": 6.0, "fused": 7.0},
    }  # fmt: skip
    assert table.choice(qkv_layer("fp16", 3136, 96, True)) is None
    assert table.choice(mlp_layer("fp16", 3136, 96, 384, False)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": CONFIG | {"cluster": 2}}, "unknown config field 'cluster'"),
        ({"config": {"block_m": 64}}, "config field 'block_h' is missing"),
        ({"config": CONFIG | {"num_warps": "4"}}, "'num_warps' must be an integer"),
        ({"config": CONFIG | {"block_h": 96}}, "block_h=96 is no power of two"),
        ({"config": CONFIG | {"block_h": 256}}, "block_h=256 does not divide 384"),
        ({"config": CONFIG | {"num_warps": 3}}, "num_warps=3 is no power of two"),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory exceed the card's 232448"),
        ({"triton": "3.5.1"}, "measured with Triton 3.5.1, this is 3.6"),
        ({"op": "conv"}, "unknown op 'conv'"),
        ({"shape": {"C": 96}}, "the shape of mlp is C, hidden, post_norm"),
        ({"range": [1, 10]}, "does not hold its 3136 rows"),
        ({"verdict": "best"}, "unknown verdict 'best'"),
        ({"also": ["int8"]}, "also must list some of fp32, tf32, fp16, bf16"),
    ],
    ids=[
        "unknown-field", "missing-field", "type", "tile", "divides", "warps", "shared-memory",
        "triton", "op", "shape", "range", "verdict", "also",
    ],
)  # fmt: skip
def test_rows_that_cannot_run_are_refused_with_the_reason(card, changes, reason):
    table = table_of(card, config_row(**changes), config_row(784))
    assert table.config(mlp(3136)) is None
    assert table.config(mlp(784)) == MlpConfig(**CONFIG)
    assert reason in table.describe()
    assert "1 rows" in table.describe()


def test_a_missing_field_of_a_row_is_named(card):
    row = config_row()
    del row["shared_bytes"]
    assert "no field 'shared_bytes'" in table_of(card, row).describe()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer": "norm"}, "unknown layer 'norm'"),
        ({"choice": "magic"}, "qkv: unknown choice 'magic'"),
        ({"shape": {"C": 96}}, "qkv: the shape is C, post_norm"),
    ],
    ids=["layer", "choice", "shape"],
)
def test_choices_that_mean_nothing_are_refused(card, changes, reason):
    assert reason in table_of(card, choices=[choice_row(**changes)]).describe()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 1}, "has schema 1, this version reads 2; run fastswin tune again"),
        ({"card": "Other Card"}, "was measured on Other Card, this is Test Card 8GB"),
        ({"capability": [8, 0]}, "was measured on Test Card 8GB"),
        ({"configs": None}, "lacks its lists"),
    ],
    ids=["schema", "card", "capability", "lists"],
)
def test_tables_of_another_kind_are_refused_whole(card, changes, reason):
    with pytest.raises(TableRefusedError, match=reason):
        TuningTable(empty_document(card) | changes, card, TRITON, "test.json")


def test_tma_is_refused_below_hopper():
    config = GemmConfig(64, 64, 64, 4, 3, tma=True)
    from fastswin.tuning.space import why_invalid

    problem = make_problem("linear", "fp16", 3136, N=288, K=96, gelu=0, residual=0)
    assert why_invalid(problem, config, (9, 0)) is None
    assert "tma needs compute capability 9.0" in why_invalid(problem, config, (8, 6))


@pytest.mark.parametrize(
    ("op", "config"),
    [
        ("linear", GemmConfig(64, 128, 64, 4, 3, True, 2)),
        ("linear", OneShotConfig(32, 64, 8)),
        ("linear", HopperGemmConfig(128, 64, 64, 5, groups=3, warps=4, bias_first=False)),
        ("layer_norm_linear", LayerNormLinearConfig(64, 32, 3, 4, 2)),
        ("layer_norm_linear", OneShotConfig(16, 32, 8)),
        ("mlp", MlpConfig(64, 64, 4, 2, True)),
        ("window_attention", WindowAttentionConfig(64, (128, 16), 2, 4, 3)),
        ("window_attention", WindowAttentionConfig(64, (), 1, 4, 2)),
        ("window_attention", WindowAttentionConfig(64, (64,), 1, programs=396)),
    ],
    ids=[
        "linear",
        "one-shot",
        "hopper",
        "layer_norm_linear",
        "one-shot-norm",
        "mlp",
        "attention-whole",
        "attention-online",
        "attention-runs",
    ],
)
def test_configurations_survive_json(op, config):
    assert config_from_dict(op, json.loads(json.dumps(config_to_dict(config)))) == config


def test_ranges_reach_halfway_and_no_further_than_half_of_a_doubling():
    measured = [49, 64, 128, 392, 3136]
    spans = ranges(measured)
    assert spans[0] == (44, 56)
    assert spans[-1][1] == int(3136 * 1.125)
    for (_, high), (low, _) in itertools.pairwise(spans):
        assert low > high
    assert (spans[1][1], spans[2][0]) == (90, 91)  # half of a step of the ladder reaches this far
    assert (spans[2][1], spans[3][0]) == (181, 278)  # further away nobody has measured
    for rows, (low, high) in zip(measured, spans, strict=True):
        assert low <= rows <= high
    assert ranges([1]) == [(1, 1)]


def test_merging_replaces_equal_rows_and_keeps_other_triton_versions():
    old = [config_row(784), config_row(3136, latency_us=20.0), config_row(784, triton="3.5")]
    merged = merge_rows(copy.deepcopy(old), [config_row(3136, latency_us=10.0)])
    assert [(r["triton"], r["rows"], r["latency_us"]) for r in merged] == [
        ("3.5", 784, 12.5), ("3.6", 784, 12.5), ("3.6", 3136, 10.0),
    ]  # fmt: skip
    assert merged[1]["range"][1] < merged[2]["range"][0]


def test_documents_have_a_row_a_line_and_are_json(card, tmp_path):
    document = empty_document(card) | {"configs": [config_row(), config_row(784)]}
    text = format_document(document)
    assert json.loads(text) == document
    assert sum('"op": "mlp"' in line for line in text.splitlines()) == 2
    path = tmp_path / "table.json"
    path.write_text(text, encoding="utf-8")
    assert read_document(path) == document


def test_find_table_says_why_there_is_none(card, tmp_path):
    assert find_table("off", card) == (None, "off")
    assert find_table("auto", card) == (None, "no table ships for Test Card 8GB")
    assert card_slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    with pytest.raises(FileNotFoundError):
        find_table(tmp_path / "nothing.json", card)
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(TableRefusedError, match="is no JSON"):
        find_table(broken, card)


def test_a_shipped_table_of_another_schema_is_passed_over(card, tmp_path, monkeypatch):
    from fastswin.tuning import table as module

    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    path = tmp_path / "test-card-8gb.json"
    path.write_text(json.dumps(empty_document(card) | {"schema": 0}), encoding="utf-8")
    table, line = find_table("auto", card)
    assert table is None
    assert line.startswith("refused: test-card-8gb.json has schema 0")
    path.write_text(format_document(empty_document(card)), encoding="utf-8")
    table, line = find_table("auto", card)
    assert table is not None
    assert line == "test-card-8gb.json, 0 rows"


def test_a_card_without_a_table_takes_its_siblings_and_says_so(card, tmp_path, monkeypatch):
    from fastswin.tuning import table as module

    monkeypatch.setattr(module, "SHIPPED", tmp_path)
    monkeypatch.setattr(module, "SIBLINGS", {card.name: "Test Card 16GB"})
    document = empty_document(dataclasses.replace(card, name="Test Card 16GB"))
    path = tmp_path / "test-card-16gb.json"
    assert find_table("auto", card) == (None, "no table ships for Test Card 8GB")
    path.write_text(format_document(document), encoding="utf-8")
    table, line = find_table("auto", card)
    assert table is not None
    assert line.endswith("measured on Test Card 16GB, which has this card's multiprocessors")
    with pytest.raises(TableRefusedError, match="was measured on Test Card 16GB"):
        find_table(path, card)  # one that is named has to be the card's own
    own = tmp_path / "test-card-8gb.json"
    own.write_text(format_document(empty_document(card)), encoding="utf-8")
    assert find_table("auto", card)[1] == "test-card-8gb.json, 0 rows"


def test_rows_that_no_model_gained_from_do_not_answer(card):
    verdicts = ("gain", "taken", "none", "loss", "untried")
    rows = [config_row(1000 * (n + 1), verdict=word) for n, word in enumerate(verdicts)]
    table = table_of(card, *rows)
    found = {word: table.config(mlp(1000 * (n + 1))) for n, word in enumerate(verdicts)}
    assert {word for word, config in found.items() if config is not None} == {"gain", "taken"}
    assert table.describe() == "test.json, 2 rows; 3 that no model gained from"


def test_a_row_answers_for_its_twin_dtype_where_that_was_checked(card):
    own = config_row(3136, dtype="bf16", config=CONFIG | {"block_m": 128})
    table = table_of(card, config_row(784, also=["bf16"]), config_row(3136, also=["bf16"]), own)
    assert table.config(mlp(784, "bf16")) == table.config(mlp(784)) == MlpConfig(**CONFIG)
    assert table.config(mlp(3136, "bf16")).block_m == 128  # its own row comes first
    assert table.config(mlp(784, "fp32")) is None
    assert table.describe() == "test.json, 3 rows"


def plan_with(table, batch=1, precision="fp16", **options):
    config: SwinConfig = find_variant("swin_tiny_patch4_window7_224")
    return make_plan(
        config, batch, (224, 224), torch.device("cpu"), PRECISIONS[precision], "triton", table,
        **options,
    )  # fmt: skip


def test_a_plan_takes_forms_and_tiles_from_its_table(card):
    choices = [
        choice_row(3136, "tiled", latency_us={"tiled": 5.0, "library": 6.0}),
        choice_row(3136, "fused", layer="mlp", shape=SHAPE, latency_us={"fused": 8.0}),
    ]
    attention = {"window_h": 7, "window_w": 7, "heads": 3, "head_dim": 32, "cosine": 0}
    tiles = {"block_q": 64, "key_tiles": [64], "heads_per_program": 3}
    configs = [config_row(), config_row(64, op="window_attention", shape=attention, config=tiles,
                                        range=[60, 70])]  # fmt: skip
    tuned, plain = plan_with(table_of(card, *configs, choices=choices)), plan_with(None)
    stage = tuned.stages[0]
    assert (plain.stages[0].qkv, plain.stages[0].mlp) == ("fused", "split")
    assert (stage.qkv, stage.mlp) == ("tiled", "fused")
    assert stage.reasons["qkv"] == "measured: tiled 5.0 us, library 6.0 us"
    assert stage.launch == {
        "mlp": MlpConfig(**CONFIG), "attention": WindowAttentionConfig(64, (64,), 3),
    }  # fmt: skip
    assert tuned.stages[1:] == plain.stages[1:]  # no row answers for them
    assert plan_with(table_of(card, *configs, choices=choices), batch=8) == plan_with(None, 8)


def test_a_form_that_the_kernels_cannot_take_is_not_planned(card):
    wide = choice_row(441, "fused", shape={"C": 768, "post_norm": 0}, range=[441, 441])
    assert plan_with(table_of(card, choices=[wide]), 9) == plan_with(None, 9)


def attention_row(windows, heads, **changes):
    shape = {"window_h": 7, "window_w": 7, "heads": heads, "head_dim": 32, "cosine": 0}
    tiles = {"block_q": 64, "key_tiles": [64], "heads_per_program": 1, "num_warps": 4}
    return config_row(windows, op="window_attention", shape=shape, config=tiles) | changes


def test_stages_of_few_rows_ask_no_table_and_say_so(card):
    table = table_of(card, attention_row(64, 3, range=[64, 64]), choices=[choice_row(3136)])
    tuned, plain = plan_with(table, pdl=True), plan_with(None, pdl=True)
    assert [s.few_rows for s in tuned.stages] == [True] * 4
    for mine, theirs in zip(tuned.stages, plain.stages, strict=True):
        assert (mine.qkv, mine.mlp, mine.launch) == (theirs.qkv, theirs.mlp, theirs.launch)
        assert "no table" in mine.reasons["tuning"]
        assert "tuning" not in theirs.reasons
    assert not any(s.few_rows for s in plan_with(table, pdl=False).stages)
    stage = plan_with(table, pdl=False).stages[0]  # the same rows outside of such a stage
    assert (stage.qkv, set(stage.launch)) == ("library", {"attention"})


def test_attention_halves_in_one_kernel_keep_their_tiles(card):
    table = table_of(card, attention_row(512, 3))
    assert plan_with(table, 8).stages[0] == plan_with(None, 8).stages[0]
    assert plan_with(None, 8).stages[0].attention == "fused"
    apart = plan_with(table, 8, fused_attention={}).stages[0]
    assert apart.launch["attention"] == WindowAttentionConfig(64, (64,), 1, 4)


def test_a_plan_in_bf16_takes_checked_rows_of_fp16(card):
    table = table_of(card, choices=[choice_row(3136, "library", also=["bf16"])])
    assert plan_with(table, precision="bf16").stages[0].qkv == "library"
    table = table_of(card, choices=[choice_row(3136, "library")])
    assert plan_with(table, precision="bf16").stages[0].qkv == "fused"


def test_reports_tell_what_a_model_gained(card):
    from fastswin.engine.tuned import tuned_gain

    name = "swin_tiny_patch4_window7_224"
    row = {"model": name, "batch": 32, "dtype": "fp16", "triton": "3.6", "heuristic_ms": 1.134,
           "tuned_ms": 1.1, "units": 4}  # fmt: skip
    document = empty_document(card) | {"models": [row, {**row, "triton": "3.5", "batch": 8}]}
    table = TuningTable(document, card, TRITON, "test.json")
    config = find_variant(name)
    line = tuned_gain(table, config, 32, (224, 224), "fp16")
    assert line == f"; {name} at batch 32: 1.134 ms by heuristics, 1.100 with it in one run"
    other = find_variant("swin_small_patch4_window7_224")
    assert tuned_gain(table, other, 32, (224, 224), "fp16") == ""
    assert tuned_gain(table, config, 8, (224, 224), "fp16") == ""  # another Triton's
    assert tuned_gain(table, config, 32, (256, 256), "fp16") == ""
    assert tuned_gain(table, config, 32, (224, 224), "bf16") == ""
    assert tuned_gain(None, config, 32, (224, 224), "fp16") == ""

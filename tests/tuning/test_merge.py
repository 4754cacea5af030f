"""Several processes' tables become one, and what ships of it answers as the whole does."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fastswin.bench.tune_merge import main, merge_tables
from fastswin.tuning.document import TableRefusedError, empty_document, format_document
from fastswin.tuning.merge import merge_documents, shipped, verdict_of
from fastswin.tuning.problem import make_problem
from fastswin.tuning.table import TuningTable

SHAPE = {"C": 96, "hidden": 384, "post_norm": 0}


def tiles(rows, block_m=64, latency_us=9.0, verdict="gain", **changes):
    return {
        "op": "mlp", "dtype": "fp16", "triton": "3.6", "shape": SHAPE, "rows": rows,
        "range": [rows, rows], "shared_bytes": 65536, "latency_us": latency_us,
        "config": {"block_m": block_m, "block_h": 64, "num_warps": 4, "num_stages": 2},
        "default_us": 10.0, "verdict": verdict,
    } | changes  # fmt: skip


def forms(choice, latency_us, verdict="gain"):
    return {
        "layer": "qkv", "dtype": "fp16", "triton": "3.6", "shape": {"C": 96, "post_norm": 0},
        "rows": 3136, "range": [3136, 3136], "choice": choice, "latency_us": latency_us,
        "verdict": verdict,
    }  # fmt: skip


def model(name, batch):
    return {"model": name, "batch": batch, "dtype": "fp16", "triton": "3.6", "units": 1,
            "heuristic_ms": 1.1, "tuned_ms": 1.0}  # fmt: skip


def table(card, configs=(), choices=(), models=()):
    return empty_document(card) | {
        "configs": list(configs), "choices": list(choices), "models": list(models),
    }  # fmt: skip


def merge(*documents):
    return merge_documents([(f"{index}.json", doc) for index, doc in enumerate(documents)])


def test_rows_of_all_tables_share_the_space_between_them(card):
    merged, conflicts = merge(
        table(card, [tiles(1000)], models=[model("b", 8)]),
        table(card, [tiles(1500), tiles(8000)], models=[model("a", 8), model("a", 32)]),
    )
    assert conflicts == []
    ranges = {row["rows"]: row["range"] for row in merged["configs"]}
    assert ranges == {1000: [889, 1224], 1500: [1225, 2121], 8000: [5657, 9000]}
    assert [(m["model"], m["batch"]) for m in merged["models"]] == [("a", 8), ("a", 32), ("b", 8)]


def test_the_row_that_is_faster_by_its_own_ratio_wins(card):
    slower_card = tiles(1000, 128, latency_us=18.0, default_us=30.0)
    merged, (line,) = merge(table(card, [tiles(1000)]), table(card, [slower_card]))
    (row,) = merged["configs"]
    assert row["config"]["block_m"] == 128
    assert "mlp fp16 rows=1000" in line
    assert "of 0.900 and, in 1.json, 0.600" in line
    one = forms("tiled", {"tiled": 8.0, "library": 10.0})
    two = forms("fused", {"fused": 9.0, "library": 10.0})
    merged, (line,) = merge(table(card, choices=[two]), table(card, choices=[one]))
    assert merged["choices"][0]["choice"] == "tiled"
    assert line.startswith("layer qkv")


def test_a_row_that_won_in_whole_models_beats_one_that_was_only_faster_apart(card):
    fast = tiles(1000, 128, latency_us=1.0, verdict="none")
    merged, (_,) = merge(table(card, [tiles(1000)]), table(card, [fast]))
    (row,) = merged["configs"]
    assert (row["config"]["block_m"], row["verdict"]) == (64, "gain")


def test_a_loss_anywhere_outweighs_gains(card):
    merged, conflicts = merge(
        table(card, [tiles(1000, verdict="loss")]), table(card, [tiles(1000)])
    )
    assert (merged["configs"][0]["verdict"], conflicts) == ("loss", [])
    assert verdict_of(["none", "gain", "untried"]) == "gain"
    assert verdict_of([]) == "untried"


def test_what_ships_answers_as_the_whole_table_does(card):
    rows = [tiles(1000), tiles(1500, verdict="none"), tiles(2000, verdict="loss"), tiles(4000)]
    merged, _ = merge(table(card, rows, [forms("tiled", {"tiled": 8.0, "library": 10.0}, "none")]))
    ships = shipped(merged)
    assert ([row["rows"] for row in ships["configs"]], ships["choices"]) == ([1000, 4000], [])
    tables = [TuningTable(doc, card, "3.6.0", "t.json") for doc in (merged, ships)]
    for count in range(800, 5000, 7):
        asked = make_problem("mlp", "fp16", count, **SHAPE)
        assert tables[0].config(asked) == tables[1].config(asked)
    with pytest.raises(TableRefusedError, match="merge the tables that tune wrote"):
        merge(ships)


def test_tables_of_two_cards_or_schemas_are_not_mixed(card):
    other = dataclasses.replace(card, name="Other Card")
    with pytest.raises(TableRefusedError, match=r"1\.json was measured on Other Card, 0\.js"):
        merge(table(card), table(other))
    with pytest.raises(TableRefusedError, match="has schema 1"):
        merge(table(card), table(card) | {"schema": 1})


def test_the_command_places_the_table_by_its_card(card, tmp_path, capsys):
    paths = []
    for index, document in enumerate((table(card, [tiles(1000)]), table(card, [tiles(1000, 128)]))):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(format_document(document), encoding="utf-8")
    out, folder = tmp_path / "all.json", tmp_path / "tuning"
    assert main([*map(str, paths), "--out", str(out), "--ship", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(out), str(folder / "test-card-8gb.json")]
    assert said.err.startswith("conflict: mlp fp16 rows=1000")
    assert json.loads(out.read_text())["configs"][0]["range"] == [889, 1125]
    assert main([str(folder / "test-card-8gb.json"), "--out", str(out)]) == 2
    assert "is what ships" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(paths[0])])
    with pytest.raises(FileNotFoundError):
        merge_tables([tmp_path / "none.json"], out, None)

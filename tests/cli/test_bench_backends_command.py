"""``fastswin bench model --backends``: record and table of its own, absent runtimes forgiven."""

from __future__ import annotations

import json

import pytest

from fastswin.bench import suites
from fastswin.bench.roofline import Ceilings


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch, brief_timing):
    monkeypatch.setattr(suites, "measure_ceilings", lambda *_: Ceilings(0.01, {"fp32": 0.05}))


def test_backends_have_a_record_and_a_table(cli, shipped, tmp_path):
    done = cli(
        "bench", "model", "--model", "swin_fashion_mnist", "--dtype", "fp32", "--batch", 1,
        "--backends", "torch,tensorrt,fastswin", "--device", "cpu", "--seconds", "0.01",
        "--out", tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    (path,) = tmp_path.rglob("*.json")
    assert path.name == "backends.json"
    records = {r["variant"]: r for r in json.loads(path.read_text())["records"]}
    assert set(records) == {"eager", "fastswin", "fastswin-openvino", "fastswin-onnxruntime"}
    assert all(record["max_abs_err"] <= 1e-4 for record in records.values())
    assert "fastswin Engine, backend openvino" in done.out
    assert "tensorrt: TensorRT needs a GPU" in done.err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--backends", "tflite"], "--backends must be among torch"),
        (["--backends", "torch,"], "--backends has an empty entry"),
        (["--backends", "torch", "--variant", "eager"], "leave out --variant"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_backends(cli, shipped, tmp_path, arguments, word):
    done = cli(
        "bench", "model", "--model", "swin_fashion_mnist", "--device", "cpu", "--out", tmp_path,
        *arguments,
    )  # fmt: skip
    assert done.code == 2
    assert word in done.error_line()
    assert list(tmp_path.iterdir()) == []

"""``fastswin bench train``: records, JSON alone on stdout, refusals."""

from __future__ import annotations

import json

import pytest

from fastswin.bench import train

REFUSED = {
    ("--suite", "speed"): "--suite must be one of train, scaling",
    ("--dtype", "fp8"): "--dtype must be one of bf16",
    ("--variant", "apex", "--device", "cpu"): "variants must be among eager",
    ("--suite", "scaling", "--batch", "1,2"): "takes one --model",
    ("--suite", "scaling", "--averaging", "mean"): "averaging must be of ddp, graph",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_refusals(cli, arguments, tmp_path):
    code, out, err = cli("bench", "train", *arguments, "--out", str(tmp_path))
    assert code == 2
    assert out == ""
    assert REFUSED[arguments] in err
    assert list(tmp_path.iterdir()) == []


def test_json_is_alone_on_stdout(cli, tmp_path, monkeypatch):
    document = {"suite": "train", "gpu": "cpu", "torch": "2", "records": []}
    result = train.TrainResult(document, tmp_path, ("a line",))
    asked = []
    monkeypatch.setattr(train, "run", lambda *a: asked.append(a) or result)
    code, out, err = cli("bench", "train", "--batch", "2", "--variant", "eager,fastswin", "--json")
    assert code == 1
    assert json.loads(out)["problems_found"] == ["a line"]
    assert "a line" in err
    tried, variants, *_ = asked[0]
    assert [p.model for p in tried] == list(train.DEFAULT_MODELS)
    assert {(p.dtype, p.batch) for p in tried} == {("bf16", 2)}
    assert variants == ["eager", "fastswin"]

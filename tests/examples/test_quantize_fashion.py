"""The quantisation examples: a short training run, records and the table of the document."""

import json
import sys
from pathlib import Path

import pytest

from fastswin.data.fashion_mnist import fashion_mnist_slice
from fastswin.data.idx import idx_bytes
from fastswin.quant import load_quantized
from fastswin.quant.ranges import fingerprint_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import qat
import quantize_fashion


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder cut from the shipped slices: 16 training and 8 test images."""
    folder = tmp_path_factory.mktemp("data")
    for stem, name, count in (("train", "calibration", 16), ("t10k", "test", 8)):
        images, labels = fashion_mnist_slice(name)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(idx_bytes(images[:count]))
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(idx_bytes(labels[:count]))
    return folder


def short_slice(name):
    return tuple(part[:8] for part in fashion_mnist_slice(name))


def test_a_short_run_writes_weights_that_the_record_can_read(data, tmp_path, monkeypatch):
    monkeypatch.setattr(qat, "fashion_mnist_slice", short_slice)
    monkeypatch.setattr(quantize_fashion, "fashion_mnist_slice", short_slice)
    arguments = ["--data", data, "--steps", 2, "--batch", 4, "--device", "cpu"]
    runs = [qat.main([str(a) for a in (*arguments, "--out", tmp_path / str(i))]) for i in range(2)]
    assert runs[0]["losses"] == runs[1]["losses"]  # fixed seeds
    path = tmp_path / "0" / "swin_qat.safetensors"
    assert path.read_bytes() == (tmp_path / "1" / "swin_qat.safetensors").read_bytes()
    loaded = load_quantized(path)
    assert loaded.calibrations["int8"].model_fingerprint == fingerprint_of(loaded.model)
    document = tmp_path / "document.md"
    document.write_text("a\n" + quantize_fashion.BEGIN + quantize_fashion.END + "\nb\n")
    monkeypatch.setattr(quantize_fashion, "DOCUMENT", document)
    monkeypatch.setattr(quantize_fashion, "RECORDS", tmp_path)
    arguments = ["--data", data, "--limit", 4, "--stress-limit", 4, "--precision", "int8"]
    quantize_fashion.main([str(a) for a in (*arguments, "--qat", path, "--out", tmp_path)])
    (record,) = tmp_path.glob("*.json")
    cases = json.loads(record.read_text())["cases"]
    assert [case["case"] for case in cases] == ["post-training", "trained", "outliers"]
    assert all(list(case["scores"]) == ["reference", "int8"] for case in cases)


def test_the_document_shows_the_records():
    text = quantize_fashion.DOCUMENT.read_text(encoding="utf-8")
    assert quantize_fashion.render(text) == text, "python examples/quantize_fashion.py --tables"

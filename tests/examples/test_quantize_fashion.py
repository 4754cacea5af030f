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
    return tuple(part[:4] for part in fashion_mnist_slice(name))


def test_a_short_run_writes_weights_that_the_record_can_read(data, tmp_path, monkeypatch):
    monkeypatch.setattr(qat, "fashion_mnist_slice", short_slice)
    monkeypatch.setattr(quantize_fashion, "fashion_mnist_slice", short_slice)
    arguments = ["--data", data, "--steps", 2, "--batch", 2, "--test-images", 2, "--device", "cpu"]
    several = ["--scheme", "int8,int8_mode2", "--out", tmp_path]
    first, other = qat.main([str(a) for a in (*arguments, *several)])
    (again,) = qat.main([str(a) for a in (*arguments, "--out", tmp_path / "again")])
    assert first["losses"] == again["losses"] != other["losses"]  # fixed seeds
    path, other = (tmp_path / s / "swin_qat.safetensors" for s in ("int8", "int8_mode2"))
    assert path.read_bytes() == (tmp_path / "again" / "swin_qat.safetensors").read_bytes()
    loaded = load_quantized(path)
    assert loaded.calibrations["int8"].model_fingerprint == fingerprint_of(loaded.model)
    document = tmp_path / "document.md"
    document.write_text("a\n" + quantize_fashion.BEGIN + quantize_fashion.END + "\nb\n")
    monkeypatch.setattr(quantize_fashion, "DOCUMENT", document)
    monkeypatch.setattr(quantize_fashion, "RECORDS", tmp_path)
    arguments = ["--data", data, "--limit", 2, "--stress-limit", 2, "--precision", "int8"]
    quantize_fashion.main([str(a) for a in (*arguments, "--qat", path, other, "--out", tmp_path)])
    (record,) = tmp_path.glob("*.json")
    cases = json.loads(record.read_text())["cases"]
    assert [case["case"] for case in cases] == ["post-training", "trained", "outliers"]
    schemes = [list(case["scores"]) for case in cases]
    assert schemes == [["reference", "int8"], ["reference", "int8", "int8_mode2"],
                       ["reference", "int8"]]  # fmt: skip


def test_unknown_schemes_are_refused(capsys):
    with pytest.raises(SystemExit):
        qat.main(["--scheme", "int8,int4"])
    assert "got 'int4'" in capsys.readouterr().err


def test_the_document_shows_the_records():
    text = quantize_fashion.DOCUMENT.read_text(encoding="utf-8")
    assert quantize_fashion.render(text) == text, "python examples/quantize_fashion.py --tables"

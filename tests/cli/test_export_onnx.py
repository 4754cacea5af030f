"""``fastswin export onnx``: the table, the JSON document, and every way to ask wrongly."""

from __future__ import annotations

import onnx
import pytest
import torch
from small_models import GREY, make_model

from fastswin.quant import calibrate, save_ranges


@pytest.fixture(scope="module")
def ranges(tmp_path_factory):
    """int8 ranges of the grey model."""
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    model = make_model(GREY)
    path = tmp_path_factory.mktemp("ranges") / "ranges.json"
    return save_ranges(model, calibrate(model, images), path)


def test_a_checkpoint_is_written_and_compared(cli, grey_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = cli("export", "onnx", "--checkpoint", grey_checkpoint)
    assert done.code == 0, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["grey.onnx"]
    assert "opset 20, fp32, batch dynamic, 28x28" in done.err
    rows = [line.split() for line in done.out.splitlines() if " random " in f" {line} "]
    assert {(row[1], row[2]) for row in rows} == {
        (folded, batch) for folded in ("folded", "unfolded") for batch in "1238"
    }
    assert all(float(row[4]) <= 1e-4 and row[5] == "100.0" for row in rows)


def test_json_of_an_eight_bit_graph_in_the_newest_opset(cli, grey_checkpoint, ranges, tmp_path):
    path = tmp_path / "a.onnx"
    done = cli(
        "export", "onnx", "--checkpoint", grey_checkpoint, "--output", path, "--calibration",
        ranges, "--opset", "newest", "--attention", "standard", "--batch", 2, "--no-fold", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = done.json()
    assert report["opset"] >= 23
    assert report["batch"] == 2
    assert report["folded"] is False
    assert report["op_counts"]["Attention"] == 2
    assert report["op_counts"]["QuantizeLinear"] == 8
    assert {row["batch"] for row in report["parity"]["rows"]} == {2}
    (version,) = [o.version for o in onnx.load(path).opset_import if o.domain == ""]
    assert version == report["opset"]


def test_a_difference_beyond_the_bound_fails_and_leaves_no_file(cli, grey_checkpoint, tmp_path):
    done = cli(
        "export", "onnx", "--checkpoint", grey_checkpoint, "--output", tmp_path / "a.onnx",
        "--bound", 0, "--batch", 1,
    )  # fmt: skip
    assert done.code == 1
    assert "no file was kept" in done.error_line()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "int4"], ["precision must be one of", "'int4'"]),
        (["--batch", "0"], ["batch must be 'dynamic' or a positive integer, got 0"]),
        (["--batch", "some"], ["batch must be 'dynamic'", "'some'"]),
        (["--image-size", "2x2x2"], ["--image-size must be like 224 or 224x288"]),
        (["--image-size", "12"], ["stage 0: the token map 3x3 is smaller than the window"]),
        (["--opset", "17"], ["opset must be at least 20, got 17"]),
        (["--opset", "99"], ["opset must be at most", "got 99"]),
        (["--opset", "oldest"], ["opset must be a number or 'newest', got 'oldest'"]),
        (["--attention", "flash"], ["attention must be one of"]),
        (["--attention", "standard"], ["attention='standard' needs opset 23"]),
        (["--attention", "fastswin", "--dynamic-size"], ["dynamic_size needs attention='plain'"]),
        (["--bound", "-1"], ["--bound"]),
        (["--output", "a.pb"], ["path must end in .onnx, got 'a.pb'"]),
        (["--calibration", "none.json"], ["none.json"]),
        (["--model", "swin_fashion_mnist"], ["--model", "--checkpoint"]),
        (["--checkpoint", "none.safetensors"], ["none.safetensors"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value[0][0] == "-" else "",
)
def test_wrong_options(cli, grey_checkpoint, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    done = cli("export", "onnx", "--checkpoint", grey_checkpoint, *arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error_line()
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--scheme", "fp8"], "--scheme must be one of ['int8'] in ranges.json, got 'fp8'"),
        (["--dynamic-size"], "calibration needs a fixed image size"),
        (["--attention", "fastswin"], "calibration needs a fixed image size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_beside_ranges(cli, grey_checkpoint, ranges, tmp_path, arguments, word):
    done = cli(
        "export", "onnx", "--checkpoint", grey_checkpoint, "--calibration", ranges, "--output",
        tmp_path / "a.onnx", *arguments,
    )  # fmt: skip
    assert done.code == 2
    assert word in done.error_line()
    assert list(tmp_path.iterdir()) == []


def test_unknown_model_shows_the_nearest(cli, tmp_path):
    done = cli(
        "export", "onnx", "--model", "swin_tiny_patch4_windw7_224", "--output", tmp_path / "a.onnx"
    )
    assert done.code == 2
    assert "swin_tiny_patch4_window7_224" in done.error_line()
    assert list(tmp_path.iterdir()) == []

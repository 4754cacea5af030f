"""``fastswin export tensorrt``: the table, the JSON document, and every way to ask wrongly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from small_models import GREY, make_model

from fastswin.quant import calibrate, save_ranges


@pytest.fixture
def graph(tmp_path) -> Path:
    """A graph of one product, which builds in a second."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "weight")
    node = helper.make_node("MatMul", ["images", "weight"], ["logits"])
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])
    body = helper.make_graph([node], "product", [images], [logits], [weight])
    path = tmp_path / "product.onnx"
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_table(cli, graph):
    output = graph.with_name("a.engine")
    done = cli("export", "tensorrt", "--onnx", graph, "--output", output, "--capability", "89,120")
    assert done.code == 0, done.err
    assert "tensorrt-rtx" in done.out
    row = next(line for line in done.out.splitlines() if "a.engine" in line)
    assert "sm_89 sm_120" in row
    assert "1:8:32" in row
    assert output.stat().st_size > 0


def test_json(cli, graph):
    output = graph.with_name("b.engine")
    done = cli(
        "export", "tensorrt", "--onnx", graph, "--output", output, "--capability", 86,
        "--batches", "2:4:4", "--precision", "tf32", "--json",
    )  # fmt: skip
    engine = done.json()["engine"]
    assert engine["batches"] == {"smallest": 2, "usual": 4, "largest": 4}
    assert engine["capabilities"] == [86]
    assert engine["tf32"] is True
    assert engine["engine_bytes"] == output.stat().st_size
    assert engine["network_layers"]["matrix_multiply"] == 1


def test_a_model_is_checked_and_built(cli, grey_checkpoint, tmp_path):
    output, kept = tmp_path / "c.engine", tmp_path / "c.onnx"
    done = cli(
        "export", "tensorrt", "--checkpoint", grey_checkpoint, "--output", output,
        "--keep-onnx", kept, "--capability", 86, "--precision", "fp32",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "max abs diff" in done.err
    assert output.is_file()
    assert kept.is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batches", "8"], ["--batches", "1:8:32"]),
        (["--batches", "4:2:8"], ["smallest <= usual"]),
        (["--capability", "sm86"], ["--capability", "positive integers"]),
        (["--capability", "90"], ["capabilities", "86"]),
        (["--runtime", "onnx"], ["runtime must be one of"]),
        (["--runtime", "tensorrt", "--capability", "86"], ["capabilities belong to"]),
        (["--timing-cache", "t.cache"], ["timing_cache belongs to"]),
        (["--portable"], ["portable belongs to"]),
        (["--model", "swin_fashion_mnist"], ["--model", "--checkpoint", "--onnx"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options(cli, graph, arguments, words):
    output = graph.with_name("x.engine")
    done = cli("export", "tensorrt", "--onnx", graph, "--output", output, *arguments)
    assert done.code == 2
    for word in words:
        assert word in done.error_line()
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--plugins"], "plugins need runtime='tensorrt'"),
        (["--precision", "fp12"], "precision must be one of"),
        (["--image-size", "big"], "--image-size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_of_a_model(cli, tmp_path, arguments, word):
    done = cli("export", "tensorrt", "--output", tmp_path / "x.engine", *arguments)
    assert done.code == 2
    assert word in done.error_line()
    assert list(tmp_path.iterdir()) == []


def test_a_scheme_that_the_ranges_lack_is_refused(cli, grey_checkpoint, tmp_path):
    model = make_model(GREY)
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    ranges = save_ranges(model, calibrate(model, images), tmp_path / "ranges.json")
    done = cli(
        "export", "tensorrt", "--checkpoint", grey_checkpoint, "--calibration", ranges,
        "--scheme", "fp8", "--output", tmp_path / "x.engine",
    )  # fmt: skip
    assert done.code == 2
    assert "--scheme must be one of ['int8'] in ranges.json, got 'fp8'" in done.error_line()
    assert not (tmp_path / "x.engine").exists()


@pytest.mark.parametrize(
    ("runtime", "module", "remedy"),
    [
        ("tensorrt-rtx", "tensorrt_rtx", "pip install 'fastswin[tensorrt]'"),
        ("tensorrt", "tensorrt", "pip install tensorrt"),
    ],
)
def test_a_missing_runtime_is_named_before_anything_is_exported(
    cli, monkeypatch, tmp_path, runtime, module, remedy
):
    monkeypatch.setitem(sys.modules, module, None)
    done = cli("export", "tensorrt", "--output", tmp_path / "x.engine", "--runtime", runtime)
    assert done.code == 3
    assert remedy in done.error_line()
    assert list(tmp_path.iterdir()) == []

"""Engines that TensorRT-RTX builds here, without a GPU, from our graphs."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from fastswin.export.onnx import export_onnx
from fastswin.export.source import open_model
from fastswin.export.tensorrt import RTX_CAPABILITIES, BatchRange, build_engine
from fastswin.export.tensorrt_export import export_tensorrt
from fastswin.models import SwinConfig, SwinTransformer
from fastswin.quant.calibrate import calibrate

SHIPPED = "swin_fashion_mnist"


def small_model(version: int = 1) -> SwinTransformer:
    torch.manual_seed(version)
    config = SwinConfig(
        version=version, image_size=(32, 40), embed_dim=16, depths=(2,), num_heads=(2,),
        window_size=4, num_classes=5,
    )  # fmt: skip
    return SwinTransformer(config).eval()


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Path of an exported graph; each is exported once."""
    folder = tmp_path_factory.mktemp("graphs")

    @functools.cache
    def export(name: str, precision: str, *, quantized: bool = False, fold: bool = True) -> Path:
        path = folder / f"{name}-{precision}-{quantized}-{fold}.onnx"
        model, _, _ = open_model(SHIPPED if name == SHIPPED else small_model(int(name[-1])))
        calibration = None
        if quantized:
            channels, size = model.config.in_channels, model.config.image_size
            images = torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(0))
            calibration = calibrate(model, images)
        export_onnx(
            model, path, precision=precision, fold=fold, check=False, calibration=calibration
        )
        return path

    return export


def header_is_sound(path: Path) -> bool:
    """What the runtime says of an engine's header; that it finds no GPU is not the engine's."""
    import tensorrt_rtx

    runtime = tensorrt_rtx.Runtime(tensorrt_rtx.Logger(tensorrt_rtx.Logger.INTERNAL_ERROR))
    _, diagnostics = runtime.get_engine_validity(path.read_bytes())
    faults = tensorrt_rtx.EngineInvalidityDiagnostics
    return not diagnostics & (int(faults.MALFORMED_ENGINE) | int(faults.VERSION_MISMATCH))


@pytest.mark.parametrize("capability", RTX_CAPABILITIES, ids="sm_{}".format)
def test_shipped_model_in_fp16(graph, tmp_path, capability):
    path = graph(SHIPPED, "fp16")
    report = build_engine(path, tmp_path / "shipped.engine", capabilities=[capability])
    assert report.capabilities == (capability,)
    assert report.batches == BatchRange(1, 8, 32)
    assert report.engine_bytes == report.path.stat().st_size > path.stat().st_size
    assert re.fullmatch(r"tensorrt-rtx \d+\.\d+\.[\d.]+", report.runtime)
    assert report.network_layers["matrix_multiply"] == 45  # 7 blocks of 6, 2 mergings, the head
    assert report.network_layers["normalization"] == 18
    products = report.engine_layers["gemm"] + report.engine_layers["runtime_fusion"]
    assert products >= 7 * 3
    assert report.engine_layers.total() < report.network_layers.total()
    assert header_is_sound(report.path)


@pytest.mark.parametrize(("version", "precision"), [(1, "fp32"), (2, "fp16")])
def test_folded_and_unfolded_graphs_give_one_engine(graph, tmp_path, version, precision):
    reports = [
        build_engine(graph(f"small-v{version}", precision, fold=fold), tmp_path / f"{fold}.engine")
        for fold in (True, False)
    ]
    assert reports[0].engine_layers == reports[1].engine_layers
    assert reports[0].engine_layers.total() > 0
    folded, unfolded = (r.network_layers.total() for r in reports)
    assert folded <= unfolded
    assert abs(reports[0].engine_bytes - reports[1].engine_bytes) < 0.01 * reports[0].engine_bytes


@pytest.mark.parametrize("capability", RTX_CAPABILITIES, ids="sm_{}".format)
def test_eight_bit_graphs_keep_their_types(graph, tmp_path, capability):
    path = graph("small-v2", "fp32", quantized=True)
    report = build_engine(path, tmp_path / "int8.engine", capabilities=[capability])
    assert report.network_layers["quantize"] == 8  # four a block
    assert report.network_layers["dequantize"] == 16
    assert report.engine_layers["gemm"] + report.engine_layers["runtime_fusion"] >= 8
    assert header_is_sound(report.path)


def test_shipped_model_in_int8_for_all_at_once(graph, tmp_path):
    path = graph(SHIPPED, "fp32", quantized=True)
    report = build_engine(path, tmp_path / "int8.engine")
    assert report.capabilities == RTX_CAPABILITIES
    assert report.network_layers["quantize"] == 7 * 4 + 2  # blocks, mergings
    assert header_is_sound(report.path)


@pytest.mark.parametrize("capabilities", [[], [86, 86], [70], [86, 90]], ids=str)
def test_capabilities_are_those_of_the_runtime(tmp_path, capabilities):
    path = tmp_path / "unread.onnx"
    path.touch()
    with pytest.raises(ValueError, match=r"capabilities must be distinct numbers of \[75, 80, 86"):
        build_engine(path, tmp_path / "x.engine", capabilities=capabilities)


def test_a_file_that_is_no_graph_is_one_line_and_no_engine(tmp_path):
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08\x08\x12")
    with pytest.raises(ValueError, match=r"broken\.onnx is no ONNX file"):
        build_engine(path, tmp_path / "x.engine")
    with pytest.raises(FileNotFoundError):
        build_engine(tmp_path / "absent.onnx", tmp_path / "x.engine")
    assert [p.name for p in tmp_path.iterdir()] == ["broken.onnx"]


def test_a_wrong_graph_gives_no_engine(tmp_path):
    from fastswin.export.report import ParityError

    model = small_model()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(ParityError):
        export_tensorrt(model, tmp_path / "wrong.engine", capabilities=[86])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "bf17"}, "precision must be one of"),
        ({"plugins": True}, "plugins need runtime='tensorrt'"),
    ],
)
def test_bad_arguments_of_the_one_call(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        export_tensorrt(small_model(), tmp_path / "x.engine", **arguments)

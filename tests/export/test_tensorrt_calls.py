"""What the builder asks TensorRT 10 and 11 for, on a stand-in, and that those calls exist."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorrt_fakes import Recorded, Severity, fake_tensorrt
from tensorrt_stand_in import front_end

from fastswin.export import kernels, tensorrt
from fastswin.export.onnx import export_onnx
from fastswin.export.plugin import LAYER_NORM_ATTRIBUTES, WINDOW_ATTENTION_ATTRIBUTES
from fastswin.export.plugin_graph import PARSER_ATTRIBUTES, has_attention_nodes, plugin_model
from fastswin.export.plugin_launch import AttentionLayer
from fastswin.export.tensorrt import BatchRange, build_engine
from fastswin.models import SwinConfig, SwinTransformer

VERSIONS = ("10.9.0.34", "11.4.0.106")


@pytest.fixture
def record(monkeypatch):
    recorded = Recorded(shape=(-1, 3, 32, 32), parses=True, refuse=False)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt(VERSIONS[1], recorded))
    return recorded


@pytest.fixture
def graph(tmp_path) -> Path:
    """A file that the stand-in's parser does not read."""
    import onnx
    from onnx import TensorProto, helper

    node = helper.make_node("Relu", ["images"], ["logits"])
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3, 32, 32])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [images], [logits])), path)
    return path


def build(graph: Path, **arguments):
    return build_engine(graph, graph.with_suffix(".engine"), runtime="tensorrt", **arguments)


@pytest.mark.parametrize("version", VERSIONS)
def test_networks_are_strongly_typed(monkeypatch, graph, version):
    recorded = Recorded(shape=(-1, 3, 32, 32), parses=True, refuse=False)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt(version, recorded))
    report = build(graph, batches=BatchRange(1, 4, 16))
    assert recorded.flags == (2 if version.startswith("10") else 0)  # 11 knows no other networks
    assert recorded.parsed == str(graph)
    assert recorded.profile == ("images", *((n, 3, 32, 32) for n in (1, 4, 16)))
    assert report.runtime == f"tensorrt {version}"
    assert report.engine_layers == {"gemm": 1, "kgen": 1}
    assert report.network_layers == {"matrix_multiply": 1, "plugin_v3": 1}
    assert report.path.read_bytes() == b"an engine"
    assert report.engine_bytes == 9
    assert report.capabilities == ()


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_products_are_fp32_unless_asked(record, graph, tf32):
    build(graph, tf32=tf32)
    assert (record.cleared is None) == tf32


def test_options_reach_the_builder(record, graph):
    build(graph, optimization_level=5, workspace_mib=512, portable=True)
    assert record.config.builder_optimization_level == 5
    assert record.pool[1] == 512 * 2**20
    assert record.config.hardware_compatibility_level.name == "AMPERE_PLUS"
    assert record.config.profiling_verbosity.name == "DETAILED"


def test_timing_cache_is_read_and_written(record, graph, tmp_path):
    cache = tmp_path / "h100.cache"
    build(graph, timing_cache=cache)
    assert (record.cache_in, cache.read_bytes()) == (b"", b" and measured")
    build(graph, timing_cache=cache)
    assert record.cache_in == b" and measured"
    cache.write_bytes(b"of another card")
    with pytest.raises(ValueError, match="of another GPU or TensorRT version"):
        build(graph, timing_cache=cache)
    assert cache.read_bytes() == b"of another card"


def test_a_fixed_batch_takes_no_range(record, graph):
    record.shape = (4, 3, 32, 32)
    assert build(graph).batches is None
    with pytest.raises(ValueError, match="the graph's is 4"):
        build(graph, batches=BatchRange())


def test_a_dynamic_image_size_is_refused(record, graph):
    record.shape = (-1, 3, -1, -1)
    with pytest.raises(ValueError, match="image size is dynamic"):
        build(graph)


def test_a_refused_network_is_one_line_and_no_file(record, graph):
    record.refuse = True
    with pytest.raises(RuntimeError, match=r"^tensorrt: no implementation for node 7$"):
        build(graph)
    assert sorted(p.name for p in graph.parent.iterdir()) == ["model.onnx"]


def test_a_graph_that_is_not_understood_says_why(record, graph):
    record.parses = False
    with pytest.raises(RuntimeError, match=r"cannot read model\.onnx: node 3 is not known"):
        build(graph)


def test_a_machine_without_a_gpu_is_told_so(monkeypatch, graph):
    recorded = Recorded(shape=(-1, 3, 32, 32), parses=True, refuse=False)
    fake = fake_tensorrt(VERSIONS[0], recorded, starts=False)
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    with pytest.raises(RuntimeError, match="TensorRT cannot start: CUDA initialization failure"):
        build(graph)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"runtime": "openvino"}, "runtime must be one of"),
        ({"runtime": "tensorrt", "capabilities": [86]}, "capabilities belong to"),
        ({"runtime": "tensorrt-rtx", "timing_cache": "t"}, "timing_cache belongs to"),
        ({"runtime": "tensorrt-rtx", "portable": True}, "portable belongs to"),
        ({"optimization_level": 6}, r"optimization_level must lie in \[0, 5\], got 6"),
    ],
)
def test_arguments_of_the_other_runtime_are_refused(graph, arguments, message):
    with pytest.raises(ValueError, match=message):
        build_engine(graph, graph.with_suffix(".engine"), **arguments)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 4), (1, 8, 4)])
def test_batches_must_be_in_order(sizes):
    with pytest.raises(ValueError, match="1 <= smallest <= usual <= largest"):
        BatchRange(*sizes)


@pytest.mark.parametrize(
    ("runtime", "module", "remedy"),
    [
        ("tensorrt", "tensorrt", "pip install tensorrt"),
        ("tensorrt-rtx", "tensorrt_rtx", r"pip install 'fastswin\[tensorrt\]'"),
    ],
)
def test_a_missing_runtime_names_its_package(monkeypatch, graph, runtime, module, remedy):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=remedy):
        build_engine(graph, graph.with_suffix(".engine"), runtime=runtime)


def test_every_call_exists_in_tensorrt_11(record):
    spec = importlib.util.find_spec("tensorrt_bindings")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    binary = Path(spec.submodule_search_locations[0], "tensorrt.so").read_bytes()
    names = {n for kind in record.classes for n in vars(kind) if not n.startswith("_")}
    names |= {member.name for kind in record.enums for member in kind}
    names |= {kind.__name__ for kind in (*record.enums, Severity)} - {"Severity"}
    names |= {
        "builder_optimization_level", "hardware_compatibility_level", "profiling_verbosity",
        "INTERNAL_ERROR", "ILogger", "desc", "num_layers", "num_errors",
    }  # fmt: skip
    assert sorted(n for n in names if n.encode() not in binary) == []


# Attention nodes to plugins.


def parsed(serialized: bytes) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Nodes of our domain and every constant of a serialised model."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load_from_string(serialized)
    constants = {t.name: numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    return [n for n in model.graph.node if n.domain == "fastswin"], constants


def attributes_of(node: Any) -> dict[str, Any]:
    from onnx import helper

    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


@pytest.fixture(scope="module")
def attention_graph(tmp_path_factory):
    """Path of a small model's graph with attention nodes on a padded map, one a version."""

    @functools.cache
    def export(version: int, precision: str) -> Path:
        torch.manual_seed(version)
        config = SwinConfig(
            version=version, image_size=(40, 32), embed_dim=16, depths=(2,), num_heads=(2,),
            window_size=4, num_classes=3,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("attention") / f"v{version}-{precision}.onnx"
        model = SwinTransformer(config).eval()
        export_onnx(model, path, attention="fastswin", precision=precision, check=False)
        return path

    return export


@pytest.mark.parametrize(("version", "precision"), [(1, "fp16"), (1, "fp32"), (2, "fp32")])
def test_attention_nodes_become_plugin_nodes(attention_graph, version, precision):
    path = attention_graph(version, precision)
    assert has_attention_nodes(path)
    serialized, count = plugin_model(path, capability=89, multiprocessors=58, layer_norms=True)
    plugins, constants = parsed(serialized)
    nodes = {n.op_type: n for n in plugins}
    assert set(nodes) == {"PackedWindowAttention", "LayerNorm"}
    assert count == len(plugins) == 2 + 6  # 2 blocks; 2 norms a block, the embedding's, the last
    attributes = {kind: attributes_of(node) for kind, node in nodes.items()}
    listed = {
        "PackedWindowAttention": WINDOW_ATTENTION_ATTRIBUTES, "LayerNorm": LAYER_NORM_ATTRIBUTES,
    }  # fmt: skip
    for kind, names in listed.items():
        assert set(attributes[kind]) == {*names, *PARSER_ATTRIBUTES}
        assert attributes[kind]["aot"] == 1
        assert attributes[kind]["plugin_namespace"] == b"fastswin"
        assert attributes[kind]["capability"] == 89
    with front_end() as module:
        from fastswin.export.plugin import register_plugins

        register_plugins()
        for kind, node in nodes.items():
            description = module.plugin._lib.QDP_REGISTRY[f"fastswin::{kind}"]
            assert len(node.input) == len(description.input_tensor_names)
    packed = constants[nodes["PackedWindowAttention"].input[1]]
    assert packed.dtype == ("float16" if precision == "fp16" else "float32")


@pytest.mark.parametrize("version", [1, 2])
def test_packed_constants_give_the_nodes_result(attention_graph, randn, device, version):
    """Shifted and not, on a padded map: the kernel on what the plugin gets, in the interpreter."""
    import onnx
    import onnxruntime
    from onnx import helper

    from fastswin.export.attention_op import expand_window_attention

    path = attention_graph(version, "fp32")
    plugins, arrays = parsed(plugin_model(path, capability=90)[0])
    constants = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    expanded = expand_window_attention(onnx.load(str(path)))
    tapped = [name for node in plugins for name in (node.input[0], node.output[0])]
    expanded.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in tapped)
    session = onnxruntime.InferenceSession(
        expanded.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    values = session.run(tapped, {"images": randn(2, 3, 40, 32).cpu().numpy()})
    shifts = set()
    for node, qkv, wanted in zip(plugins, values[::2], values[1::2], strict=True):
        given = attributes_of(node)
        B, H, W, channels = qkv.shape
        heads = given["num_heads"]
        shift = (given["shift_height"], given["shift_width"])
        shifts.add(shift)
        layer = AttentionLayer(
            "fp32", "fp32", B, (H, W), (H, W), True, heads, channels // 3 // heads,
            (given["window_height"], given["window_width"]), shift, bool(given["cosine"]), 90,
        )  # fmt: skip
        config = layer.default_config()
        out = torch.full(wanted.shape, float("nan"), device=device)
        kernels.fastswin_window_attention[(layer.programs(config, B, H, W),)](
            torch.from_numpy(qkv).to(device), *(constants[name] for name in node.input[1:]),
            H, W, *layer.windows(H, W), out, **layer.constants(config), num_warps=config.num_warps,
        )  # fmt: skip
        torch.testing.assert_close(out.cpu(), torch.from_numpy(wanted), rtol=0, atol=2e-6)
    assert len(shifts) == 2


def test_plugins_are_compiled_for_this_card(monkeypatch, record, attention_graph):
    path = attention_graph(1, "fp32")
    monkeypatch.setattr(
        tensorrt, "_this_card", lambda portable: {"capability": 80 if portable else 90}
    )
    monkeypatch.setattr("fastswin.export.plugin.register_plugins", lambda: None)
    for portable, capability in ((False, 90), (True, 80)):
        report = build(path, portable=portable)
        model, where = record.parsed
        assert where == str(path)
        assert report.plugins == 2
        nodes, _ = parsed(model)
        assert [attributes_of(node)["capability"] for node in nodes] == [capability] * 2


def test_rtx_refuses_attention_nodes(tmp_path, attention_graph):
    path = attention_graph(1, "fp32")
    with pytest.raises(ValueError, match="TensorRT-RTX takes no plugins"):
        build_engine(path, tmp_path / "x.engine", runtime="tensorrt-rtx")
    assert not (tmp_path / "x.engine").exists()

"""Exported graphs against the readable model (SWO-25, 26 and the size half of 27)."""

from __future__ import annotations

import copy
import json

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_cases import CASES, ODD, SIZE, exported, images, model_of
from swin_references import our_model

from fastswin.export import onnx as export_module
from fastswin.export.attention_op import DOMAIN
from fastswin.export.onnx import export_onnx
from fastswin.export.opset import newest_opset
from fastswin.export.parity import ParityError, check_parity, legal_difference, open_session
from fastswin.models import SwinConfig

STATIC = [case for case in CASES if case != "v2-any-size"]


def constants(case: str) -> dict[str, np.ndarray]:
    graph = onnx.load(exported(case).path).graph
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


@pytest.mark.parametrize("case", CASES)
def test_every_batch_folded_and_unfolded_is_the_model(case):
    parity = exported(case).parity
    assert {(row.batch, row.folded) for row in parity.rows} == {
        (batch, folded) for batch in (1, 2, 3, 8) for folded in (True, False)
    }
    assert parity.max_abs_diff <= parity.bound
    if CASES[case][1].get("precision") != "fp16":
        assert parity.max_abs_diff < 1e-4  # field case 25, absolute
    if not CASES[case][1].get("features"):
        assert parity.top1_agreement == 1.0


def test_fp32_logits_are_held_to_an_absolute_bound_whatever_their_size(tmp_path):
    """Field case 25: a difference of 5e-4 in logits of 100 is as wrong as in logits of 1."""
    wide = copy.deepcopy(model_of("v1"))
    graph = onnx.load(exported("v1").path)
    for tensor in graph.graph.initializer:
        if tensor.name.startswith("head."):
            values = 40 * numpy_helper.to_array(tensor) + 5e-4 * (tensor.name == "head.bias")
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))
    with torch.no_grad():
        wide.head.weight.mul_(40)
        wide.head.bias.mul_(40)
    onnx.save(graph, tmp_path / "wide.onnx")
    with pytest.raises(ParityError, match=r"by [45]\.\d+e-04, more than 1\.0e-04"):
        check_parity(tmp_path / "wide.onnx", wide, batches=(1,))
    assert legal_difference("fp32", 100.0) == 1e-4
    assert legal_difference("fp32", 100.0, features=True) == pytest.approx(1e-2)
    assert legal_difference("fp16", 0.5) == 1e-2


def test_newest_opset_is_that_of_the_installed_exporter():
    versions = {case: exported(case).opset for case in ("v1", "v1-fp16", "v2-standard")}
    assert versions == {"v1": 20, "v1-fp16": newest_opset(), "v2-standard": newest_opset()}
    assert newest_opset() >= 23
    (version,) = (o.version for o in onnx.load(exported("v2-standard").path).opset_import)
    assert version == newest_opset()


@pytest.mark.parametrize("case", ["v1", "v2-unfolded"])
def test_batch_axis_is_dynamic_beyond_what_was_checked(case):
    x = images(5)
    with torch.no_grad():
        expected = model_of(case)(x).numpy()
    (actual,) = open_session(exported(case).path).run(None, {"images": x.numpy()})
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("case", STATIC)
def test_graph_holds_no_control_flow_and_no_shape_arithmetic(case):
    counts = exported(case).op_counts
    forbidden = {"Loop", "If", "Scan", "Shape", "Range", "ScatterND", "SequenceAt", "Expand"}
    assert forbidden & set(counts) == set()
    graph = onnx.load(exported(case).path).graph
    names = {tensor.name for tensor in graph.initializer}
    names |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    shapes = [node.input[1] for node in graph.node if node.op_type == "Reshape"]
    assert [name for name in shapes if name not in names] == []


@pytest.mark.parametrize("case", ["v1", "v1-fp16", "v2-standard"])
def test_mask_is_finite_fits_fp16_and_exists_once_a_stage(case):
    masks = [value for name, value in constants(case).items() if "mask" in name]
    assert len(masks) == 1  # the second stage has no shifted block
    assert set(np.unique(masks[0])) == {-100.0, 0.0}
    assert np.isfinite(masks[0].astype(np.float16)).all()
    assert all(
        np.isfinite(value).all() for value in constants(case).values() if value.dtype.kind == "f"
    )


def test_no_constant_is_written_twice():
    values = [v.tobytes() for v in constants("v1").values() if v.nbytes > 64]
    assert len(values) == len(set(values))


def test_fp16_graph_is_typed_and_keeps_scores_and_outputs_in_fp32():
    model = onnx.load(exported("v1-fp16").path)
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    weights = {kind for name, kind in kinds.items() if name.endswith(".weight")}
    assert weights == {TensorProto.FLOAT16}
    assert {kind for name, kind in kinds.items() if name.endswith("attn.bias")} == {1}
    (output,) = model.graph.output
    assert output.type.tensor_type.elem_type == TensorProto.FLOAT
    casts = exported("v1-fp16").op_counts["Cast"]
    # both ends, around each block's softmax, and around the sum that pools a padded map
    assert casts == 2 + 2 * 3 + 2


def test_weight_beyond_fp16_is_refused_by_name(tmp_path):
    model = our_model(depths=(1,), num_heads=(2,))
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"head\.weight holds 1e\+05, beyond fp16"):
        export_onnx(model, tmp_path / "m.onnx", precision="fp16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["v1-fastswin-odd-features", "v2-fastswin-fp16"])
def test_attention_is_one_node_a_block(case):
    model = onnx.load(exported(case).path)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == ["WindowAttention"] * 3
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[1].attribute}
    assert attributes["num_heads"] == 2
    assert list(attributes["window_size"]) == [4, 4]
    assert list(attributes["shift_size"]) == [2, 2]
    cosine = case.startswith("v2")
    assert attributes["scale"] == pytest.approx(1.0 if cosine else 12**-0.5)
    padded = not cosine
    assert [bool(name) for name in nodes[1].input] == [True, True, *(
        [False, True] if padded else [True]
    )]  # fmt: skip
    assert {opset.domain for opset in model.opset_import} == {"", DOMAIN}


def test_standard_attention_is_one_node_a_block():
    assert exported("v2-standard").op_counts["Attention"] == 3
    assert "Softmax" not in exported("v2-standard").op_counts


def test_another_image_size_is_refused_by_the_graph():
    session = open_session(exported("v1").path)
    with pytest.raises(Exception, match="invalid dimensions for input: images"):
        session.run(None, {"images": images(1, ODD).numpy()})


@pytest.mark.parametrize("size", [(32, 32), (33, 50), (48, 64), ODD, (61, 128)], ids=str)
def test_any_size_is_right(size):
    x = images(3, size)
    with torch.no_grad():
        expected = model_of("v2-any-size")(x).numpy()
    for folded in (True, False):
        session = open_session(exported("v2-any-size").path, folded=folded)
        (actual,) = session.run(None, {"images": x.numpy()})
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_map_smaller_than_its_window_is_refused_by_the_graph():
    session = open_session(exported("v2-any-size").path)
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"images": images(1, (16, 64)).numpy()})


def test_fixed_batch_refuses_others_and_big_weights_go_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "EXTERNAL_DATA_BYTES", 1000)
    path = tmp_path / "two.onnx"
    model = our_model(depths=(2,), num_heads=(2,))
    report = export_onnx(model, path, batch=2)
    assert [row.batch for row in report.parity.rows] == [2, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two.onnx", "two.onnx.data"]
    assert report.external_data == tmp_path / "two.onnx.data"
    assert path.stat().st_size + report.external_data.stat().st_size == report.file_bytes
    with pytest.raises(Exception, match=r"Got: 1 Expected: 2"):
        open_session(path).run(None, {"images": images(1, (64, 96)).numpy()})


def test_difference_beyond_the_bound_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_text("earlier")
    with pytest.raises(ParityError, match=r"logits differ from the model's by .*no file was kept"):
        export_onnx(our_model(depths=(1,), num_heads=(2,)), path, bound=0.0)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_text() == "earlier"


def test_nan_in_the_graph_is_found(tmp_path):
    model = onnx.load(exported("v1").path)
    (bias,) = (t for t in model.graph.initializer if t.name == "head.bias")
    values = numpy_helper.to_array(bias).copy()
    values[3] = np.nan
    bias.CopyFrom(numpy_helper.from_array(values, bias.name))
    onnx.save(model, tmp_path / "nan.onnx")
    with pytest.raises(ParityError, match="gives NaN or infinity"):
        check_parity(tmp_path / "nan.onnx", model_of("v1"))


def test_other_weights_are_found():
    other = our_model(image_size=SIZE, depths=(2, 1), seed=1)
    with pytest.raises(ParityError, match="random images, batch 1, 48x64, folded"):
        check_parity(exported("v1").path, other)


def test_real_images_are_compared_too():
    parity = check_parity(exported("v1").path, model_of("v1"), images=images(4), batches=(2, 8))
    assert {(row.images, row.batch) for row in parity.rows} == {
        ("random", 2), ("random", 8), ("real", 2), ("real", 4),
    }  # fmt: skip


def test_file_says_what_it_is():
    model = onnx.load(exported("v2-standard").path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    config = SwinConfig.from_dict(json.loads(metadata["fastswin.config"]))
    assert config == model_of("v2-standard").config
    assert metadata["fastswin.attention"] == "standard"
    assert model.producer_name == "fastswin"
    onnx.checker.check_model(exported("v2-standard").path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int4"}, "precision must be one of"),
        ({"batch": 0}, "batch must be 'dynamic' or a positive integer, got 0"),
        ({"opset": 17}, "opset must be at least 20, got 17"),
        ({"opset": 99}, "opset must be at most [0-9]+, the newest that the installed onnxscript"),
        ({"opset": "oldest"}, "opset must be a number or 'newest', got 'oldest'"),
        ({"attention": "flash"}, "attention must be one of"),
        ({"attention": "standard"}, "attention='standard' needs opset 23 or later, got 20"),
        ({"attention": "fastswin", "dynamic_size": True}, "dynamic_size needs attention='plain'"),
        ({"image_size": -3}, "image_size must be a positive integer or a pair"),
        ({"image_size": 8}, "stage 0: the token map 2x2 is smaller than the window"),
        ({"path": "m.pb"}, "path must end in .onnx, got 'm.pb'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, arguments, message):
    path = tmp_path / arguments.pop("path", "m.onnx")
    with pytest.raises(ValueError, match=message):
        export_onnx(model_of("v1"), path, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_absolute_positions_have_one_size(tmp_path):
    model = our_model(depths=(1,), num_heads=(2,), absolute_position_embedding=True)
    with pytest.raises(ValueError, match="dynamic_size: this model has an absolute position"):
        export_onnx(model, tmp_path / "m.onnx", dynamic_size=True)


def test_source_is_a_name_a_path_or_a_module(tmp_path):
    with pytest.raises(TypeError, match="source must be a model name"):
        export_onnx(3, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="unknown name 'swin_tyni'"):
        export_onnx("swin_tyni", tmp_path / "m.onnx")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        export_onnx(tmp_path / "none.safetensors", tmp_path / "m.onnx")

"""Plugins under TensorRT's real Python front-end: what an engine would hold of each layer."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorrt_stand_in import front_end, plan

from fastswin import ops
from fastswin.export import kernels
from fastswin.export.plugin import (
    LAYER_NORM_ATTRIBUTES,
    WINDOW_ATTENTION_ATTRIBUTES,
    register_plugins,
)
from fastswin.export.plugin_launch import (
    PLAIN_SHARED_BYTES,
    AttentionLayer,
    LayerNormLayer,
    common_multiprocessors,
)
from fastswin.export.ptx import compile_ptx, cut_hidden_parameters, strip_source_lines
from fastswin.ops.window_attention.packing import LOG2_E, pack_bias, pack_head_scale
from fastswin.testing.tolerance import assert_close_to_oracle

SCRIPT = Path(__file__).with_name("drive_plugin.py")
CAPABILITIES = (75, 80, 86, 89, 90, 120)

NAMES = [
    *(f"v1-w7-sm{c}" for c in CAPABILITIES), "v2-w8", "padded-map", "any-map", "fp32-w7",
    "w8-needs-fewer-stages", "w20-online", *(f"norm-sm{c}" for c in CAPABILITIES),
    "norm-100-channels",
]  # fmt: skip
ATTENTION = [name for name in NAMES if not name.startswith("norm")]

#: Registers spilled per thread, in bytes, that do not show beside a kernel's loads.
SPILL_BYTES = 64


@functools.cache
def planned() -> dict[str, dict]:
    """Every case of drive_plugin.py by name; two processes compile."""
    folder = Path(__file__).parent
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(folder.parents[1]), str(folder)]),
    }
    parts = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(part), "2"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for part in range(2)
    ]  # fmt: skip
    found = {}
    for process in parts:
        output, errors = process.communicate(timeout=500)
        assert process.returncode == 0, errors[-2000:]
        for line in output.splitlines():
            layer = json.loads(line)
            found[layer["name"]] = layer
    return found


def test_every_case_is_planned():
    assert sorted(planned()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_description_has_the_operators_shape_and_type(name):
    layer = planned()[name]
    assert layer["output_types"] == [layer["dtype"]]
    assert layer["output_shapes"] == layer["wanted_shapes"]


@pytest.mark.parametrize("name", NAMES)
def test_launch_is_the_launchers(name):
    layer = planned()[name]
    assert [grid[0] for grid in layer["grids"]] == [grid[0] for grid in layer["launcher_grids"]]
    assert all(grid[1:] == [1, 1] for grid in layer["grids"])
    assert all(len(grid) == 1 for grid in layer["launcher_grids"])
    assert layer["block"] == [layer["launcher_threads"], 1, 1]
    assert layer["integers"] == layer["launcher_integers"]
    assert layer["shared_bytes"] <= PLAIN_SHARED_BYTES


@pytest.mark.parametrize("name", ATTENTION)
def test_kernel_and_constants_are_the_launchers(name):
    layer = planned()[name]
    assert layer["constants"].items() >= layer["launcher_constants"].items()
    assert bool(layer["constants"]["BLOCK_K"]) == ("online" in layer["launcher_kernel"])
    assert layer["chosen_by_operator"] == (name != "w8-needs-fewer-stages")


@pytest.mark.parametrize("name", NAMES)
def test_ptx_is_of_the_capability_and_takes_tensorrts_arguments(name):
    layer = planned()[name]
    ptx, kernel = layer["ptx"], layer["kernel"]
    target = re.search(r"\.target sm_(\d+)a?", ptx)
    assert f".version {'8.7' if layer['capability'] >= 100 else '8.0'}" in ptx
    assert target is not None
    assert int(target[1]) == layer["capability"]
    assert layer["spilled_bytes"] <= SPILL_BYTES  # from the assembler, so the PTX assembles
    entry = re.search(rf"\.visible \.entry {kernel}\(([^)]*)\)", ptx)
    assert entry is not None
    kinds = [parameter.split()[1] for parameter in entry[1].split(",")]
    inputs = 4
    assert kinds == [".u64"] * inputs + [".u32"] * len(layer["integers"][0]) + [".u64"]
    assert "fastswin/" not in ptx  # no path of the machine that compiled it
    assert "_scratch" not in ptx


def test_the_same_kernel_is_the_same_text_for_compatible_cards():
    layers = planned()
    stripped = {
        c: re.sub(r"\.(target|version).*", "", layers[f"norm-sm{c}"]["ptx"]) for c in (86, 89)
    }
    assert stripped[86] == stripped[89]


@pytest.fixture
def tensorrt():
    with front_end() as module:
        register_plugins()
        yield module


def test_registering_twice_is_no_error(tensorrt):
    register_plugins()
    assert {name for name, _, _ in tensorrt.get_plugin_registry().creators} == {
        "PackedWindowAttention", "LayerNorm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("PackedWindowAttention", WINDOW_ATTENTION_ATTRIBUTES), ("LayerNorm", LAYER_NORM_ATTRIBUTES)],
)
def test_fields_are_the_listed_attributes_in_order(tensorrt, name, attributes):
    creator = tensorrt.get_plugin_registry().get_creator(name, "1", "fastswin")
    assert tuple(f.name for f in creator.field_names) == attributes
    assert {f.type.name for f in creator.field_names} == {"INT64"}


def test_without_tensorrt_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(ImportError, match="pip install tensorrt"):
        register_plugins()


def test_tensorrt_without_plugins_of_this_kind_is_refused(monkeypatch):
    with front_end() as module:
        monkeypatch.delattr(module.plugin, "aot_impl")
        with pytest.raises(ImportError, match=r"TensorRT >= 10\.9, this is 11\.4"):
            register_plugins()


def test_eight_bit_tensors_are_refused(tensorrt):
    with pytest.raises(TypeError, match="plugins take fp32, fp16 and bf16"):
        plan(
            tensorrt, "LayerNorm", {"capability": 86},
            [("INT8", ["B", 4, 4, 32]), ("HALF", [32]), ("HALF", [32]), ("FLOAT", [1])],
            {"B": 1}, {"B": 1},
        )  # fmt: skip


# The adapters' argument order, by value: run by position in the interpreter.


def attention_layer(map_size, window, shift, heads, *, cosine=False, fixed=True):
    return AttentionLayer(
        "fp32", "fp32", 2, map_size, map_size, fixed, heads, 8, window, shift, cosine, 90
    )


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(attention_layer((8, 12), (4, 4), (2, 2), 2), id="shifted"),
        pytest.param(attention_layer((7, 10), (4, 3), (0, 1), 3), id="padded"),
        pytest.param(attention_layer((8, 4), (4, 4), (2, 2), 2, cosine=True), id="cosine"),
        pytest.param(attention_layer((8, 8), (4, 4), (0, 0), 2, fixed=False), id="any-map"),
        pytest.param(attention_layer((9, 17), (9, 9), (4, 4), 1), id="online"),
    ],
)
def test_attention_adapter_is_the_operator(layer, randn, device):
    H, W = layer.map_size
    channels = 3 * layer.num_heads * layer.head_dim
    qkv, qkv_bias = randn(2, H, W, channels), randn(channels)
    bias = randn(layer.num_heads, layer.tokens, layer.tokens)
    logit_scale = randn(layer.num_heads, 1, 1) + 1 if layer.cosine else None
    packed = pack_bias(bias, layer.num_heads, layer.window_size, layer.shift_size, device)
    head_scale = pack_head_scale(logit_scale)
    if head_scale is None:
        head_scale = torch.full((layer.num_heads,), layer.head_dim**-0.5 * LOG2_E, device=device)
    out = torch.full((2, H, W, channels // 3), float("nan"), device=device)
    config = layer.default_config()
    kernels.fastswin_window_attention[(layer.programs(config, 2, H, W),)](
        qkv, packed, head_scale, qkv_bias, H, W, *layer.windows(H, W), out,
        **layer.constants(config), num_warps=config.num_warps,
    )  # fmt: skip
    arguments = {
        "num_heads": layer.num_heads, "window_size": layer.window_size,
        "shift_size": layer.shift_size, "impl": "reference",
    }  # fmt: skip
    tensors = {"qkv": qkv, "bias": bias, "logit_scale": logit_scale, "qkv_bias": qkv_bias}
    eager = ops.window_attention(**tensors, **arguments)
    wide = {k: None if t is None else t.double() for k, t in tensors.items()}
    assert_close_to_oracle(out, eager, ops.window_attention(**wide, **arguments), torch.float32)


@pytest.mark.parametrize("channels", [24, 96, 100])
def test_norm_adapter_is_the_operator(channels, randn, device):
    layer = LayerNormLayer("fp32", "fp32", channels, 90)
    x, weight, bias = 3 * randn(5, 7, channels) + 1, randn(channels), randn(channels)
    out = torch.full_like(x, float("nan"))
    eps = torch.tensor([1e-3], device=device)
    kernels.fastswin_layer_norm[(layer.programs(35),)](
        x, weight, bias, eps, 35, out, **layer.constants(), num_warps=4
    )
    eager = ops.layer_norm(x, weight, bias, eps=1e-3, impl="reference")
    oracle = ops.layer_norm(x.double(), weight.double(), bias.double(), eps=1e-3, impl="reference")
    assert_close_to_oracle(out, eager, oracle, torch.float32)


ENTRY = """
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u32 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2
)
{
	ld.param.b64 %rd1, [k_param_0];
	ld.param.b64 %rd1, [READ];
}
"""


def test_hidden_parameters_are_cut():
    text, kinds = cut_hidden_parameters(ENTRY.replace("READ", "k_param_0"), 2)
    assert kinds == ("u64", "u32")
    assert "k_param_1" in text
    assert "k_param_2" not in text


def test_a_hidden_parameter_that_is_read_is_no_plugin():
    with pytest.raises(RuntimeError, match="reads k_param_2"):
        cut_hidden_parameters(ENTRY.replace("READ", "k_param_2"), 2)


def test_too_few_parameters_are_an_error():
    with pytest.raises(RuntimeError, match="takes 3 parameters, not 4"):
        cut_hidden_parameters(ENTRY, 4)


def test_source_lines_are_stripped():
    ptx = (
        '\t.loc\t1 98 0  // forward.py:98:0\n\t.file\t1 "/home/me/forward.py"\n\tret;\n'
        "\t.section\t.debug_abbrev\n\t{\n.b8 1 // a comment\n\t}\n"
    )
    assert strip_source_lines(ptx).split() == ["ret;"]


def test_the_interpreter_compiles_no_ptx(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        compile_ptx(kernels.fastswin_layer_norm, {}, {}, capability=90, num_warps=4)


@pytest.mark.parametrize(("capability", "count"), [(86, 82), (87, 82), (103, 148), (70, 40)])
def test_unknown_cards_take_the_nearest_older_ones_size(capability, count):
    assert common_multiprocessors(capability) == count

"""Schemes: presets, legality, overrides, JSON."""

import dataclasses
import json

import pytest

from fastswin.quant import PRESETS, WIDE, LayerScheme, Scheme, find_scheme
from fastswin.quant.scheme import KINDS

FC2 = "layers.0.blocks.1.mlp.fc2"


def outputs(scheme):
    return {kind for kind in KINDS if getattr(scheme, kind).output == "quantized"}


def test_what_the_presets_write_in_eight_bits():
    assert outputs(PRESETS["int8_mode1"]) == {"qkv", "proj", "fc2", "reduction"}
    assert outputs(PRESETS["int8_mode2"]) == {"qkv", "proj"}
    assert outputs(PRESETS["int8"]) == outputs(PRESETS["fp8"]) == {"qkv"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_per_channel_and_static_and_survive_json(name):
    scheme = PRESETS[name]
    for kind in KINDS:
        layer = getattr(scheme, kind)
        assert (layer.weight, layer.activation) == ("per_channel", "per_tensor")
        assert layer.format == ("fp8" if name == "fp8" else "int8")
    again = Scheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert again == scheme
    assert again.fingerprint == scheme.fingerprint
    assert len({s.fingerprint for s in PRESETS.values()}) == len(PRESETS)


def test_fingerprint_is_of_what_is_done_not_of_the_name():
    scheme = PRESETS["int8"]
    assert dataclasses.replace(scheme, name="other").fingerprint == scheme.fingerprint
    assert scheme.override({FC2: WIDE}).fingerprint != scheme.fingerprint


def test_the_last_matching_override_wins():
    fp8 = LayerScheme(format="fp8")
    scheme = PRESETS["int8"].override({"layers.0.*": WIDE, FC2: fp8}, name="mixed")
    assert scheme.name == "mixed"
    assert scheme.layer(FC2) == fp8
    assert scheme.layer("layers.0.blocks.0.attn.qkv") == WIDE
    assert scheme.layer("layers.1.blocks.0.attn.qkv") == PRESETS["int8"].qkv
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_fc1_writes_what_fc2_reads():
    fc1 = "layers.0.blocks.1.mlp.fc1"
    assert PRESETS["int8"].writes(fc1) == "int8"
    assert PRESETS["int8"].override({FC2: WIDE}).writes(fc1) == "wide"
    assert PRESETS["int8"].writes(FC2) == "wide"
    assert PRESETS["int8_mode1"].writes(FC2) == "int8"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LayerScheme(format="int4"), "format must be one of"),
        (lambda: LayerScheme(weight="per_row"), "weight must be one of"),
        (lambda: LayerScheme(observer="histogram"), "observer must be one of"),
        (lambda: LayerScheme(percentile=0.5), r"percentile must lie in \(50, 100\]"),
        (lambda: Scheme("x", fc2=LayerScheme(activation="per_token")), "fc2: activation must be"),
        (lambda: Scheme("x", fc1=LayerScheme(output="quantized")), "fc1: output must be 'wide'"),
        (
            lambda: PRESETS["int8"].override({"*.proj": LayerScheme(activation="per_token")}),
            "proj: activation must be",
        ),
        (lambda: find_scheme("int9"), "scheme must be one of .*int8_mode1"),
        (lambda: PRESETS["int8"].layer("head"), "'head' is not quantisable"),
        (lambda: Scheme.from_dict({"name": "x"}), "malformed"),
        (lambda: Scheme.from_dict({**PRESETS["int8"].to_dict(), "bits": 4}), "malformed"),
    ],
    ids=lambda v: None,
)
def test_illegal_schemes(build, message):
    with pytest.raises(ValueError, match=message):
        build()

"""Names and shapes of every source layout, there and back (SWO-17, SWO-20)."""

from __future__ import annotations

import pytest
import torch
from swin_references import KIND_IDS, KINDS, build, images_of, logits, our_model, reference
from torch import nn

from fastswin.models import CheckpointError, config_of, from_live, load_checkpoint
from fastswin.models.checkpoint import detect_layout, huggingface, microsoft, openmmlab, timm
from fastswin.models.checkpoint.layout import parameters_only
from fastswin.models.checkpoint.merging import official_to_unfold, unfold_to_official


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_source_official_source_is_the_identity(framework, version):
    model = build(framework, version)
    source = parameters_only(model.state_dict())
    if framework == "torchvision" and version == 2:  # ignored there, zeros on the way back
        for name, tensor in source.items():
            if name.endswith("qkv.bias"):
                tensor.view(3, -1)[1].zero_()
    layout = detect_layout(source).layout
    assert layout.name == framework
    official = layout.to_official(source)
    assert official.keys() == from_live(model).state_dict().keys()
    assert_same(layout.from_official(official, config_of(model)), source)


@pytest.mark.parametrize("generation", ["old", "current"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    "layout", [timm.LAYOUT, huggingface.LAYOUT, openmmlab.LAYOUT, microsoft.LAYOUT],
    ids=lambda layout: layout.name,
)  # fmt: skip
@pytest.mark.parametrize("classes", [0, 7], ids=["headless", "classifier"])
def test_official_source_official_is_the_identity(layout, version, generation, classes):
    model = our_model(version, num_classes=classes)
    state = model.state_dict()
    source = layout.from_official(state, model.config, generation=generation)
    detected = detect_layout(source)
    same_names = generation == "old" and layout.name == "timm"  # old timm is the official layout
    assert detected.layout.name == ("microsoft" if same_names else layout.name)
    assert_same(detected.layout.to_official(detected.state), dict(state))


def test_hugging_face_names_of_both_generations():
    model = our_model(1)
    old = huggingface.from_official(model.state_dict(), model.config, generation="old")
    current = huggingface.from_official(model.state_dict(), model.config)
    block = "swin.encoder.layers.0.blocks.0."
    for name in ("attention.self.query.weight", "attention.output.dense.bias",
                 "attention.self.relative_position_bias_table", "intermediate.dense.weight",
                 "output.dense.weight"):  # fmt: skip
        assert block + name in old
    for name in ("attention.q_proj.weight", "attention.o_proj.bias", "mlp.fc1.weight",
                 "attention.relative_position_bias.relative_position_bias_table",
                 "mlp.fc2.weight"):  # fmt: skip
        assert block + name in current


def test_hugging_face_v2_key_has_no_bias():
    model = our_model(2)
    source = huggingface.from_official(model.state_dict(), model.config)
    stem = "swinv2.encoder.layers.0.blocks.0.attention.self."
    assert stem + "query.bias" in source
    assert stem + "value.bias" in source
    assert stem + "key.bias" not in source
    source[stem + "key.bias"] = torch.full((24,), 7.0)
    with pytest.raises(CheckpointError, match=r"1 unexpected \(layers.0.blocks.0.attn.k.bias\)"):
        load_checkpoint(source, config=model.config)


# --- SWO-17: where merging sits ---------------------------------------------------------------


def tiny_state(**changes):
    """A Swin-T state dict with three merging layers, official names, cheap depths."""
    model = our_model(embed_dim=24, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=2)
    return model, {**model.state_dict(), **changes}


MIXES = {
    "old": ("old", None),
    "current": ("current", None),
    "current-in-model-wrapper": ("current", "model"),
    "merging-current-head-old": ("current", "head"),
    "merging-old-head-current": ("old", "head.fc"),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_merging_order_is_told_from_shapes(mix):
    generation, change = mix
    model, state = tiny_state()
    source = timm.from_official(state, model.config, generation=generation)
    widths = {n: t.shape for n, t in source.items() if n.endswith("reduction.weight")}
    first = "layers.0" if generation == "old" else "layers.1"
    assert widths[f"{first}.downsample.reduction.weight"] == (48, 96)
    if change == "model":
        source = {"model": source}
    elif change == "head":
        source = {n.replace("head.fc.", "head."): t for n, t in source.items()}
    elif change == "head.fc":
        source = {n.replace("head.", "head.fc."): t for n, t in source.items()}
    loaded = load_checkpoint(source)
    assert torch.equal(logits(loaded.model, images_of()), logits(model, images_of()))


@pytest.mark.parametrize("rename", [False, True], ids=["official-names", "openmmlab-names"])
def test_ambiguous_merging_is_refused(rename):
    model, state = tiny_state()
    extra = {
        "layers.3.downsample.norm.weight": torch.ones(768),
        "layers.3.downsample.reduction.weight": torch.ones(384, 768),
    }
    state = {**state, **extra}
    if rename:
        state = openmmlab.from_official(state, model.config)
    with pytest.raises(CheckpointError, match=r"ambiguous merging layers.*\[0, 1, 2, 3\] of 4"):
        load_checkpoint(state)


def test_merging_that_fits_neither_order_is_refused():
    model, state = tiny_state()
    state["layers.1.downsample.reduction.weight"] = torch.ones(96, 100)
    with pytest.raises(CheckpointError, match="ambiguous merging layers"):
        load_checkpoint(state, config=model.config)


# --- OpenMMLab -------------------------------------------------------------------------------


@pytest.mark.parametrize("map_size", [(4, 6), (3, 5)], ids=["even", "odd"])
@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_unfold_merging_gives_the_same_tokens(version, map_size):
    """Merging as OpenMMLab runs it, nn.Unfold and all, on the permuted weights."""
    model = our_model(version)
    source = openmmlab.from_official(model.state_dict(), model.config)
    stage = 0 if version == 1 else 1
    stem = f"backbone.stages.{stage}.downsample."
    weight, scale, shift = (
        source[stem + n] for n in ("reduction.weight", "norm.weight", "norm.bias")
    )
    x = torch.randn(2, *map_size, 24, generator=torch.Generator().manual_seed(0))
    image = nn.functional.pad(x.permute(0, 3, 1, 2), (0, map_size[1] % 2, 0, map_size[0] % 2))
    tokens = nn.Unfold(2, stride=2)(image).transpose(1, 2)
    if version == 1:
        tokens = nn.functional.layer_norm(tokens, (96,), scale, shift) @ weight.T
    else:
        tokens = nn.functional.layer_norm(tokens @ weight.T, (48,), scale, shift)
    with torch.no_grad():
        ours = model.layers[0].downsample(x).flatten(1, 2)
    torch.testing.assert_close(tokens, ours, atol=1e-5, rtol=0)
    assert not torch.equal(weight, model.layers[0].downsample.reduction.weight)


def test_unfold_permutation_inverts_itself():
    x = torch.arange(3 * 20.0).view(3, 20)
    assert torch.equal(unfold_to_official(official_to_unfold(x)), x)
    assert torch.equal(official_to_unfold(unfold_to_official(x)), x)
    assert not torch.equal(unfold_to_official(x), x)


def test_openmmlab_detector_backbone():
    """A detector has a norm per output stage and other heads: reported, and refused by default."""
    model = our_model(1, num_classes=0)
    source = {
        "backbone." + n: t
        for n, t in openmmlab.from_official(model.state_dict(), model.config).items()
    }
    loaded = load_checkpoint(source)
    assert loaded.model.config.window_convention == "torchvision"
    source |= {"backbone.norm0.weight": torch.ones(24), "neck.lateral.weight": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match=r"2 unexpected \(norm0.weight, neck.lateral.weight"):
        load_checkpoint(source)
    partial = load_checkpoint(source, allow_partial=True)
    assert torch.equal(logits(partial.model, images_of()), logits(model, images_of()))


# --- SimMIM ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_simmim_encoder(version):
    model = our_model(version, num_classes=0)
    state = microsoft.from_official(model.state_dict(), model.config, generation="old")
    if version == 2:
        assert any("rpe_mlp" in name for name in state)
    source = {"encoder." + name: tensor for name, tensor in state.items()}
    source["encoder.mask_token"] = torch.zeros(1, 1, 24)
    source |= {"decoder.0.weight": torch.ones(48, 48, 1, 1), "decoder.0.bias": torch.ones(48)}
    loaded = load_checkpoint({"model": source}, config=model.config)
    assert loaded.report.prefix == "encoder."
    assert set(loaded.report.ignored) == {"mask_token", "decoder.0.weight", "decoder.0.bias"}
    assert torch.equal(logits(loaded.model, images_of()), logits(model, images_of()))


def test_22k_head():
    model = our_model(1, num_classes=21841)
    assert load_checkpoint(dict(model.state_dict())).model.config.num_classes == 21841


def test_conventions_follow_the_framework():
    expected = {
        ("timm", 1): "timm", ("timm", 2): "timm",
        ("torchvision", 1): "torchvision", ("torchvision", 2): "torchvision",
        ("huggingface", 1): "microsoft", ("huggingface", 2): "timm",
        ("microsoft", 1): "microsoft", ("microsoft", 2): "microsoft",
    }  # fmt: skip
    for (framework, version), convention in expected.items():
        model = reference(framework, version)
        assert config_of(model).window_convention == convention
        if version == 1 or framework in ("torchvision", "microsoft"):
            loaded = load_checkpoint(dict(model.state_dict()))
            assert loaded.model.config.window_convention == convention

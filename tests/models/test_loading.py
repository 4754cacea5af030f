"""Wrappers, prefixes, coverage and our own files (SWO-18)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from swin_references import images_of, logits, our_model

from fastswin.models import (
    CheckpointError,
    SwinConfig,
    SwinTransformer,
    find_variant,
    load_checkpoint,
    save_checkpoint,
)
from fastswin.models.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    return our_model(1)


@pytest.fixture(scope="module")
def state(model):
    return dict(model.state_dict())


def same_logits(loaded, model):
    return torch.equal(logits(loaded.model, images_of()), logits(model, images_of()))


def settings_object():
    return object()


WRAPPINGS = {
    "bare": lambda s: s,
    "model": lambda s: {"model": s},
    "state_dict": lambda s: {"state_dict": s},
    "model_state_dict": lambda s: {"model_state_dict": s},
    "nested": lambda s: {"model": {"state_dict": s}},
    "optimizer-beside": lambda s: {
        "model": s, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "epoch": 3,
    },
    "settings-object-beside": lambda s: {"model": s, "config": settings_object()},
    "numbers-among-tensors": lambda s: {**s, "epoch": 3},
}  # fmt: skip


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS.keys())
def test_wrappers_come_off(wrap, state, model):
    loaded = load_checkpoint(wrap(state))
    assert same_logits(loaded, model)
    assert loaded.report.coverage == 1.0
    assert not loaded.report.ema


PREFIXES = ["module.", "backbone.", "encoder.", "module.backbone.", "model.", "swin.",
            "_orig_mod.", "student.backbone."]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefix_comes_off_the_front(prefix, state, model):
    loaded = load_checkpoint({prefix + name: tensor for name, tensor in state.items()})
    assert loaded.report.prefix == prefix
    assert prefix in str(loaded.report)
    assert same_logits(loaded, model)


def test_head_outside_the_prefix(state, model):
    source = {
        ("module." if n.startswith("head.") else "module.backbone.") + n: t
        for n, t in state.items()
    }
    assert same_logits(load_checkpoint(source), model)


def test_module_in_the_middle_is_left_alone(state):
    source = {n.replace("blocks.1.attn.", "blocks.1.module.attn."): t for n, t in state.items()}
    with pytest.raises(CheckpointError, match=r"10 missing .* 10 unexpected .*blocks\.1\.module\."):
        load_checkpoint(source)


def test_prefix_is_stripped_once(state):
    source = {"module." + n: t for n, t in state.items()}
    source["module.module.norm.weight"] = source.pop("module.norm.weight")
    with pytest.raises(CheckpointError, match=r"1 missing \(norm.weight\).*module.norm.weight"):
        load_checkpoint(source)


def test_two_models_under_two_prefixes_are_refused(state):
    source = {p + n: t for p in ("student.", "teacher.") for n, t in state.items()}
    with pytest.raises(CheckpointError, match=r"\['student.', 'teacher.'\]"):
        load_checkpoint(source)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
@pytest.mark.parametrize("ema", [False, True], ids=["plain", "averaged"])
def test_averaged_weights_are_chosen_explicitly(key, ema, state, model):
    averaged_model = our_model(1, seed=3)
    source = {
        "state_dict": state,
        key: {"module." + n: t for n, t in averaged_model.state_dict().items()},
    }
    loaded = load_checkpoint(source, ema=ema)
    assert loaded.report.ema is ema
    assert loaded.report.wrapper == (key if ema else "state_dict")
    assert same_logits(loaded, averaged_model if ema else model)
    assert ("averaged" in str(loaded.report)) is ema


def test_averaged_weights_alone_are_taken_and_reported(state):
    assert load_checkpoint({"state_dict_ema": state}).report.ema


@pytest.mark.parametrize("source", [lambda s: s, lambda s: {"model": s}], ids=["bare", "model"])
def test_no_averaged_weights(source, state):
    with pytest.raises(CheckpointError, match="ema=True but there are no averaged weights"):
        load_checkpoint(source(state), ema=True)


def test_two_sets_of_plain_weights_are_refused(state):
    with pytest.raises(CheckpointError, match="more than one set of weights: model, state_dict"):
        load_checkpoint({"model": state, "state_dict": state})


# --- coverage --------------------------------------------------------------------------------


def test_half_of_the_keys(model, state):
    half = dict(list(state.items())[::2])
    with pytest.raises(CheckpointError, match=r"\d+ missing \("):
        load_checkpoint(half, config=model.config)
    loaded = load_checkpoint(half, config=model.config, allow_partial=True)
    assert set(loaded.report.matched) == set(half)
    assert set(loaded.report.missing) == set(state) - set(half)
    assert loaded.report.coverage == pytest.approx(len(half) / len(state))
    assert f"loaded {len(half)} of {len(state)} tensors" in str(loaded.report)
    for name, tensor in half.items():
        assert torch.equal(loaded.model.state_dict()[name], tensor)
    assert not loaded.model.training


def test_one_missing_weight_is_named(model, state):
    state = {n: t for n, t in state.items() if n != "norm.bias"}
    with pytest.raises(CheckpointError, match=r"1 missing \(norm.bias\)"):
        load_checkpoint(state)


def test_one_unexpected_weight_is_named(state):
    with pytest.raises(CheckpointError, match=r"1 unexpected \(extra.weight\)"):
        load_checkpoint({**state, "extra.weight": torch.ones(2)})


@pytest.mark.parametrize("partial", [False, True], ids=["strict", "allow_partial"])
def test_zero_coverage_always_raises(partial, model):
    source = {
        "layers.9.blocks.9.attn.qkv.weight": torch.ones(72, 24),
        "layers.9.blocks.9.norm1.weight": torch.ones(24),
    }
    with pytest.raises(CheckpointError, match="no weight of this checkpoint fits the model"):
        load_checkpoint(source, config=model.config, allow_partial=partial)


def foreign(kind):
    import timm
    import torchvision

    with torch.device("meta"):
        if kind == "convnext":
            return torchvision.models.convnext_tiny().state_dict()
        if kind == "resnet":
            return torchvision.models.resnet18().state_dict()
        return timm.create_model("vit_tiny_patch16_224").state_dict()


@pytest.mark.parametrize("partial", [False, True], ids=["strict", "allow_partial"])
@pytest.mark.parametrize(
    ("kind", "first"),
    [("convnext", r"features.0.0.weight \[96, 3, 4, 4\]"),
     ("resnet", r"conv1.weight \[64, 3, 7, 7\]"),
     ("vit", r"cls_token \[1, 1, 192\]")],
    ids=["convnext", "resnet", "vit"],
)  # fmt: skip
def test_other_architectures_are_refused(kind, first, partial):
    with pytest.raises(CheckpointError, match=f"not a Swin Transformer.*{first}") as refused:
        load_checkpoint(foreign(kind), allow_partial=partial)
    assert "\n" not in str(refused.value)


def test_shape_mismatch_names_key_and_shapes(model, state):
    state = {**state, "layers.0.blocks.0.mlp.fc1.weight": torch.ones(90, 24)}
    message = r"layers.0.blocks.0.mlp.fc1.weight has shape \[90, 24\], the model needs \[96, 24\]"
    for partial in (False, True):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(state, config=model.config, allow_partial=partial)


def test_head_of_another_class_count(model, state):
    config = model.config.replace(num_classes=3)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \[7, 48\].*\[3, 48\]"):
        load_checkpoint(state, config=config)
    with pytest.raises(CheckpointError, match=r"head.weight has shape \[7, 48\].*\[3, 48\]"):
        load_checkpoint(state, num_classes=3)
    loaded = load_checkpoint(state, num_classes=3, allow_partial=True)
    assert loaded.report.missing == ("head.weight", "head.bias")
    assert loaded.report.unexpected == ("head.weight", "head.bias")
    assert loaded.model.head.bias.abs().max() == 0
    assert torch.equal(loaded.model.norm.weight, model.norm.weight)


def test_head_dropped_on_request(model, state):
    loaded = load_checkpoint(state, num_classes=0)
    assert loaded.report.ignored == ("head.weight", "head.bias")
    assert logits(loaded.model, images_of()).shape == (3, 48)


def test_the_callers_tensors_are_copied(state, model):
    source = {name: tensor.clone() for name, tensor in state.items()}
    loaded = load_checkpoint(source)
    for tensor in source.values():
        tensor.zero_()
    assert same_logits(loaded, model)


def test_half_precision_weights_become_fp32(state):
    loaded = load_checkpoint({n: t.half() for n, t in state.items()})
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"config": our_model(1).config, "model_name": "swin_tiny_patch4_window7_224"},
      "config or model_name"),
     ({"resize_bias": "bilinear"}, "resize_bias must be one of"),
     ({"model_name": "swin_tinny"}, "unknown model name")],
    ids=["both-hints", "resize-method", "model-name"],
)  # fmt: skip
def test_bad_arguments(arguments, message, state):
    with pytest.raises(ValueError, match=message):
        load_checkpoint(state, **arguments)


# --- our own files ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_own_file_loads_without_a_hint(version, tmp_path):
    extra = {"qk_scale": 0.3} if version == 1 else {"pretrained_window_sizes": (3, 2)}
    model = our_model(version, layer_norm_eps=1e-4, window_convention="torchvision", **extra)
    path = save_checkpoint(model, tmp_path / "a.safetensors", {"classes": ["cat", "dög"], "n": 2})
    loaded = load_checkpoint(path)
    assert loaded.model.config == model.config
    assert loaded.report.config_from == "file"
    assert loaded.metadata == {"classes": ["cat", "dög"], "n": 2}
    assert same_logits(loaded, model)


def test_own_file_keeps_its_config_as_json(tmp_path, model):
    path = save_checkpoint(model, tmp_path / "a.safetensors")
    metadata = read_checkpoint(path).metadata
    assert json.loads(metadata["fastswin_config"])["window_size"] == [4, 4]


def test_saving_is_atomic(tmp_path, model, monkeypatch):
    path = save_checkpoint(model, tmp_path / "a.safetensors")
    before = path.read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(our_model(1, seed=9), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [("a.pth", None, "must end in .safetensors"),
     ("a.safetensors", {"fastswin_config": 1}, "reserved keys")],
    ids=["suffix", "reserved"],
)  # fmt: skip
def test_saving_refuses(tmp_path, model, name, extra, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(model, tmp_path / name, extra)
    assert list(tmp_path.iterdir()) == []


def test_damaged_config_in_metadata(tmp_path, state):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save_file(state, path, metadata={"fastswin_config": '{"depth": 3}'})
    with pytest.raises(CheckpointError, match="unknown SwinConfig keys"):
        load_checkpoint(path)


def test_loaded_model_is_ours_and_trainable(state):
    loaded = load_checkpoint(state)
    assert type(loaded.model) is SwinTransformer
    assert not loaded.model.training
    assert all(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_a_model_without_values_is_not_initialised(name, monkeypatch):
    """On the meta device torch 2.11 imports its compiler (2 to 4 s) to draw no numbers."""
    drawn = []
    monkeypatch.setattr(torch.nn.init, "trunc_normal_", lambda weight, std: drawn.append(weight))
    with torch.device("meta"):
        assert SwinTransformer(find_variant(name)).head.weight.is_meta
    assert drawn == []
    model = SwinTransformer(find_variant(name).replace(depths=(1,), num_heads=(1,), embed_dim=32))
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert {id(weight) for weight in linear} <= {id(weight) for weight in drawn}


def test_loading_a_checkpoint_imports_no_compiler(tmp_path):
    path = tmp_path / "small.safetensors"
    config = SwinConfig(
        image_size=(16, 16), embed_dim=16, depths=(1,), num_heads=(1,), window_size=2
    )  # fmt: skip
    save_checkpoint(SwinTransformer(config), path)
    code = (
        "import sys; from fastswin import Engine\n"
        f"Engine({str(path)!r}, 'fp32', device='cpu', backend='torch')\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )  # fmt: skip
    assert done.stdout.split() == ["False"]

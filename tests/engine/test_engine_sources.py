"""What an engine is built from: live models, checkpoints, names; a snapshot of each."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import cpu_engine, images_like, largest_difference, tiny
from swin_references import KIND_IDS, KINDS, build, images_of, logits, reference

from fastswin.engine import Engine
from fastswin.models import SwinConfig, save_checkpoint

TOLERANCE = 1e-4
NAME = "swin_tiny_patch4_window7_224"


@pytest.mark.parametrize(("framework", "version"), KINDS, ids=KIND_IDS)
def test_live_models_give_their_frameworks_logits(framework, version):
    theirs = reference(framework, version)
    expected = logits(theirs, images_of())
    assert (expected[0] - expected[1]).abs().max() > 1e-2
    assert largest_difference(cpu_engine(theirs)(images_of()), expected) <= TOLERANCE


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_huggingface_epsilon(version):
    """It keeps 1e-5 in embedding and merging norms, whatever layer_norm_eps says."""
    theirs = build("huggingface", version, layer_norm_eps=0.1)
    engine = cpu_engine(theirs)
    assert (engine.config.layer_norm_eps, engine.config.resample_eps) == (0.1, 1e-5)
    assert largest_difference(engine(images_of()), logits(theirs, images_of())) <= TOLERANCE


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_safetensors_checkpoint(tmp_path, version):
    model = tiny(version)
    path = tmp_path / "model.safetensors"
    save_checkpoint(model, path)
    engine = cpu_engine(path)
    images = images_like(model)
    assert largest_difference(engine(images), model(images)) <= 1e-5
    assert largest_difference(cpu_engine(str(path))(images), model(images)) <= 1e-5
    assert "model.safetensors" in str(engine.report())


def test_official_pth_checkpoint(tmp_path):
    """Microsoft's layout: weights under "model", derived buffers beside them."""
    theirs = reference("microsoft", 1)
    path = tmp_path / "swin.pth"
    torch.save({"model": theirs.state_dict(), "epoch": 299}, path)
    config = SwinConfig(
        image_size=(64, 96), num_classes=7, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=4, window_convention="microsoft",
    )  # fmt: skip
    engine = cpu_engine(path, config=config)
    assert largest_difference(engine(images_of()), logits(theirs, images_of())) <= TOLERANCE


def test_refresh_reads_the_file_again(tmp_path):
    first, second = tiny(1, seed=0), tiny(1, seed=1)
    path = tmp_path / "model.safetensors"
    save_checkpoint(first, path)
    engine = cpu_engine(path)
    images = images_like(first)
    assert largest_difference(engine(images), first(images)) <= 1e-5
    save_checkpoint(second, path)
    assert largest_difference(engine(images), first(images)) <= 1e-5
    engine.refresh()
    assert largest_difference(engine(images), second(images)) <= 1e-5
    assert largest_difference(first(images), second(images)) > 1e-2


def test_refresh_of_a_lost_file_keeps_the_engine(tmp_path):
    model = tiny(1)
    path = tmp_path / "model.safetensors"
    save_checkpoint(model, path)
    engine = cpu_engine(path)
    images = images_like(model)
    before = engine(images)
    path.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        engine.refresh()
    assert torch.equal(engine(images), before)


def test_name():
    torch.manual_seed(3)
    engine = cpu_engine(NAME, pretrained=False)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    first = engine(images)
    assert first.shape == (2, 1000)
    engine.refresh()  # random weights stay those of the engine
    assert torch.equal(engine(images), first)
    assert NAME in str(engine.report())


def test_unknown_name_lists_the_nearest():
    with pytest.raises(ValueError, match=f"unknown model name 'swin_tinny.*nearest: .*{NAME}"):
        Engine("swin_tinny_patch4_window7_224", device="cpu")


WRONG = {
    "number": (3, TypeError, "source must be a model name, a checkpoint path or .* got int"),
    "none": (None, TypeError, "source must be a model name, a checkpoint path or .* got NoneType"),
    "tensor": (torch.zeros(3), TypeError, "source must be a model name, .* got Tensor"),
    "state-dict": ({"a": torch.zeros(3)}, TypeError, "source must be .* got dict"),
    "class": (torch.nn.Linear, TypeError, "source must be .* got type"),
    "linear": (torch.nn.Linear(2, 2), TypeError, "Linear is not a Swin model"),
    "lost-file": ("nowhere/model.pth", OSError, "model.pth"),
    "lost-file-in-place": ("model.safetensors", OSError, "model.safetensors"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_wrong_sources(case):
    source, error, message = case
    with pytest.raises(error, match=message) as refused:
        cpu_engine(source)
    assert "\n" not in str(refused.value)


def test_convolutional_network():
    import torchvision

    with torch.device("meta"):
        resnet = torchvision.models.resnet18()
    with pytest.raises(TypeError, match="ResNet is not a Swin model"):
        cpu_engine(resnet)


@pytest.mark.parametrize(
    ("source", "message"),
    [(lambda: tiny(1), "a live model, which has its own"), (lambda: NAME, "a named model")],
    ids=["live", "name"],
)
def test_config_does_not_apply(source, message):
    with pytest.raises(ValueError, match=f"config does not apply to {message}"):
        cpu_engine(source(), config=SwinConfig())


def test_config_of_another_shape(tmp_path):
    path = tmp_path / "model.safetensors"
    model = tiny(1)
    save_checkpoint(model, path)
    with pytest.raises(ValueError, match=r"shape|embed_dim|fit"):
        cpu_engine(path, config=model.config.replace(embed_dim=64))


SOURCES = {
    "ours": lambda: tiny(1),
    "ours-v2": lambda: tiny(2),
    "timm": lambda: build("timm", 1),
    "torchvision": lambda: build("torchvision", 2),
    "huggingface": lambda: build("huggingface", 2),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_snapshot_until_refreshed(make, precision):
    model = make().train()
    state = copy.deepcopy(model.state_dict())
    flags = [p.requires_grad for p in model.parameters()]
    engine = cpu_engine(model, precision)
    images = images_of((64, 96), 2)
    before = engine(images)
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(engine(images), before)
    assert all(
        torch.equal(a, b)
        for a, b in zip(engine.features(images), engine.features(images), strict=True)
    )
    engine.refresh()
    after = engine(images)
    assert largest_difference(after, before) > 1e-2
    expected = logits(model.eval(), images)
    bound = TOLERANCE if precision == "fp32" else 3e-2 * expected.abs().max().item()
    assert largest_difference(after, expected) <= bound


def test_dropout_of_the_source_does_not_act():
    model = tiny(1, drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5).train()
    images = images_like(model)
    assert largest_difference(cpu_engine(model)(images), model.eval()(images)) <= 1e-5

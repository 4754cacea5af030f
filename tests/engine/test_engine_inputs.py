"""Images that an engine refuses, converts, or takes in any strides."""

from __future__ import annotations

import pytest
import torch
from engine_cases import cpu_engine, images_like, largest_difference, tiny

from fastswin.engine import Engine


@pytest.fixture(scope="module")
def model():
    return tiny(1)


@pytest.fixture(scope="module")
def engine(model):
    return cpu_engine(model)


REFUSED = {
    "rank-3": (torch.zeros(3, 34, 50), ValueError, r"must have 4 dimensions .*\(3, 34, 50\)"),
    "rank-5": (torch.zeros(1, 1, 3, 34, 50), ValueError, "images must have 4 dimensions"),
    "channels": (torch.zeros(1, 4, 34, 50), ValueError, "images must have 3 channels"),
    "channels-last": (torch.zeros(1, 34, 50, 3), ValueError, "images must have 3 channels"),
    "uint8": (torch.zeros(1, 3, 34, 50).byte(), TypeError, "images must be a float .*uint8"),
    "int64": (torch.zeros(1, 3, 34, 50).long(), TypeError, "images must be a float .*int64"),
    "bool": (torch.zeros(1, 3, 34, 50).bool(), TypeError, "images must be a float .*bool"),
    "complex": (torch.zeros(1, 3, 34, 50) * 1j, TypeError, "images must be a float .*complex64"),
    "under-a-patch": (torch.zeros(1, 3, 3, 50), ValueError, r"3x50 px are smaller than one patch"),
    "meta": (torch.zeros(1, 3, 34, 50, device="meta"), ValueError, "images are on meta .* on cpu"),
    "array": ([[1.0]], TypeError, "images must be a torch.Tensor, got list"),
    "none": (None, TypeError, "images must be a torch.Tensor, got NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("method", ["__call__", "features", "check_finite"])
def test_refused(engine, method, case):
    images, error, message = case
    with pytest.raises(error, match=message) as refused:
        getattr(engine, method)(images)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
@pytest.mark.parametrize("classes", [7, 0])
def test_empty_batch(version, classes):
    model = tiny(version, num_classes=classes)
    engine = cpu_engine(model, "fp16")
    images = torch.zeros(0, 3, 41, 50)
    logits = engine(images)
    assert (logits.shape, logits.dtype) == ((0, classes or 64), torch.float16)
    shapes = [tuple(f.shape) for f in engine.features(images, "NHWC")]
    assert shapes == [tuple(f.shape) for f in model.forward_features(images)]
    assert [tuple(f.shape) for f in engine.features(images)] == [(0, 32, 11, 13), (0, 64, 6, 7)]
    with pytest.raises(ValueError, match="at least one image"):
        engine.check_finite(images)


def crop(images):
    batch, channels, height, width = images.shape
    wide = torch.full((batch, channels + 2, height + 20, width + 30), float("nan"))
    inside = wide[:, 1:-1, 9 : 9 + height, 20 : 20 + width]
    return inside.copy_(images)


LAYOUTS = {
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "crop": crop,
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every-second": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "batch-last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_strides_do_not_matter(model, engine, layout):
    made = layout(images_like(model, 3))
    assert not made.is_contiguous()
    before = made.clone()
    # the CPU's convolution has one algorithm for each memory format: a rounding apart
    assert largest_difference(engine(made), engine(before.contiguous())) <= 1e-6
    assert torch.equal(made, before)


@pytest.mark.parametrize("layout", ["channels-last", "crop"])
def test_strides_do_not_matter_to_the_kernels(layout):
    model = tiny(1, depths=(1,), num_heads=(2,), image_size=(18, 26))
    engine = cpu_engine(model, impl="triton")
    made = LAYOUTS[layout](images_like(model, 1))
    assert largest_difference(engine(made), engine(made.contiguous())) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_other_float_dtypes_are_converted(dtype, impl):
    model = tiny(1, depths=(1,), num_heads=(2,), image_size=(18, 26))
    engine = cpu_engine(model, impl=impl)
    images = images_like(model, 1).to(dtype)
    logits = engine(images)
    assert logits.dtype == torch.float32
    assert largest_difference(logits, engine(images.float())) == 0


@pytest.mark.parametrize("convention", ["timm", "microsoft"])
def test_map_smaller_than_the_window_names_the_stage(convention):
    engine = cpu_engine(tiny(1, image_size=(64, 96), window_convention=convention))
    with pytest.raises(ValueError, match=r"stage 1: the token map 3x6 is smaller than the window"):
        engine(torch.zeros(1, 3, 24, 48))


def test_torchvision_pads_a_map_smaller_than_the_window():
    model = tiny(1, image_size=(64, 96), window_convention="torchvision")
    images = images_like(model, size=(16, 24))
    assert largest_difference(cpu_engine(model)(images), model(images)) <= 1e-5


def test_layout_is_named(engine):
    with pytest.raises(ValueError, match=r"layout must be 'NCHW' or 'NHWC', got 'CHW'"):
        engine.features(torch.zeros(1, 3, 34, 50), "CHW")


ARGUMENTS = {
    "precision": ({"precision": "int4"}, ValueError, r"precision must be one of \['bf16', 'fp16'"),
    "precision-dtype": ({"precision": torch.float16}, ValueError, "precision must be one of"),
    "tf32-on-cpu": ({"precision": "tf32"}, ValueError, "'tf32' needs an NVIDIA GPU; use 'fp32'"),
    "device-kind": ({"device": "meta"}, ValueError, "device must be 'cuda', .* or 'cpu', got 'me"),
    "device-name": ({"device": "gpu"}, ValueError, "device must be 'cuda', .* or 'cpu', got 'gpu"),
    "impl": ({"impl": "cudnn"}, ValueError, "impl must be one of .* got 'cudnn'"),
    "ladder-empty": ({"graph_batch_sizes": ()}, ValueError, "graph_batch_sizes must be positive"),
    "ladder-zero": ({"graph_batch_sizes": (0, 4)}, ValueError, "graph_batch_sizes must be pos"),
    "max-graphs": ({"max_graphs": 0}, ValueError, "max_graphs must be at least 1, got 0"),
}


@pytest.mark.parametrize("case", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_are_refused_by_name(model, case):
    arguments, error, message = case
    with pytest.raises(error, match=message) as refused:
        Engine(model, **{"device": "cpu", **arguments})
    assert "\n" not in str(refused.value)


def test_cuda_without_a_gpu(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda' was asked for but torch sees no GPU; use device="):
        Engine(model, device="cuda")

"""The engine on a GPU: accuracy gates at real sizes, images as they come, the user's switches."""

from __future__ import annotations

import copy

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny
from engine_gpu_cases import cuda_images, small
from swin_references import perturb

from fastswin.engine import Engine
from fastswin.models import create_model

pytestmark = pytest.mark.gpu

#: Largest difference from fp32 eager, by precision (design: numerics and gates).
GATES = {"fp32": 1e-4, "tf32": 5e-3}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

MODELS = {
    "swin-tiny": ("swin_tiny_patch4_window7_224", (224, 224), {}),
    "swin-tiny-wide": ("swin_tiny_patch4_window7_224", (224, 448), {"img_size": (224, 448)}),
    "swin-base-384": ("swin_base_patch4_window12_384", (384, 384), {}),
    "swin-tiny-c24": ("swin_tiny_c24_patch4_window8_256", (256, 256), {}),
    "swinv2-tiny": ("swinv2_tiny_window8_256", (256, 256), {}),
    "swinv2-tiny-window16": ("swinv2_tiny_window16_256", (256, 256), {}),
}


@pytest.fixture(autouse=True)
def exact_references():
    """fp32 references in fp32: cuDNN's convolutions default to TF32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


@pytest.fixture(scope="module", params=MODELS.keys())
def case(request):
    """timm's model (ours where timm has none) with perturbed weights, images, its fp32 logits."""
    import timm

    name, size, arguments = MODELS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make = timm.create_model if timm.is_model(name) else create_model
        model = perturb(make(name, **arguments)).cuda().eval()
    images = torch.randn(8, 3, *size, generator=torch.Generator().manual_seed(1)).cuda()
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with torch.no_grad():
        logits = model(images)
    torch.backends.cudnn.conv.fp32_precision = before
    return model, images, logits


@pytest.mark.parametrize("precision", GATES.keys())
def test_single_precision_gates(case, precision):
    model, images, expected = case
    logits = Engine(model, precision)(images)
    assert largest_difference(logits, expected) <= GATES[precision]
    if precision == "fp32":
        assert torch.equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("precision", DTYPES.keys())
def test_half_precision_gates(case, precision):
    """No worse than 1.5 times the eager model in that dtype."""
    model, images, expected = case
    half = copy.deepcopy(model).to(DTYPES[precision])
    with torch.no_grad():
        eager = half(images.to(DTYPES[precision]))
    logits = Engine(model, precision)(images)
    assert bool(torch.isfinite(logits).all())
    bound = 1.5 * largest_difference(eager, expected)
    assert largest_difference(logits, expected) <= bound


def test_size_that_is_no_multiple_of_anything():
    """250x317 pixels: no whole number of patches, windows or pairs; timm pads after the roll."""
    import torchvision

    model = perturb(torchvision.models.swin_t(num_classes=20)).cuda()
    images = torch.randn(2, 3, 250, 317, generator=torch.Generator().manual_seed(2)).cuda()
    with torch.no_grad():
        expected = model(images)
        half = copy.deepcopy(model).half()(images.half())
    assert largest_difference(Engine(model, "fp32")(images), expected) <= GATES["fp32"]
    bound = 1.5 * largest_difference(half, expected)
    assert largest_difference(Engine(model, "fp16")(images), expected) <= bound


@pytest.mark.parametrize("user", ["tf32", "none"])
def test_users_tf32_switch_does_not_leak(user):
    model = tiny(1, embed_dim=96, num_heads=(3, 6), image_size=(112, 84), window_size=7)
    images = images_like(model, 4)
    with torch.no_grad():
        expected = model.double()(images.double())
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = user
        engine = Engine(model.float(), "fp32")
        for call in (engine, Engine(model, "fp32", cuda_graphs=False)):
            logits = call(images.cuda())
            assert matmul.fp32_precision == user
            assert largest_difference(logits.cpu(), expected) <= 1e-5
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("layout", ["channels-last", "crop", "transposed"])
def test_any_strides(graphs, layout):
    model = small()
    x = cuda_images(model, 2)
    wide = torch.full((2, 4, 80, 100), float("nan"), device="cuda")
    wide[:, 1:, 11:67, 5:89] = x
    made = {
        "channels-last": x.contiguous(memory_format=torch.channels_last),
        "crop": wide[:, 1:, 11:67, 5:89],
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
    }[layout]
    engine = Engine(model, cuda_graphs=graphs)
    assert torch.equal(engine(made), engine(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_float_dtypes_are_converted(dtype, graphs):
    model = small()
    engine = Engine(model, "fp32", cuda_graphs=graphs)
    x = cuda_images(model, 2).to(dtype)
    assert torch.equal(engine(x), engine(x.float()))


def test_images_on_the_cpu_are_refused():
    model = small()
    with pytest.raises(ValueError, match=r"images are on cpu but the engine is on cuda:0"):
        Engine(model)(images_like(model))


def test_a_model_on_the_gpu_as_source():
    model = small().cuda()
    x = cuda_images(model, 2)
    with torch.no_grad():
        expected = model(x)
    assert largest_difference(Engine(model, "fp32")(x), expected) <= 1e-5
    assert next(model.parameters()).is_cuda


def test_overflow_is_located():
    model = small()
    with torch.no_grad():
        model.layers[1].blocks[0].mlp.fc2.weight.mul_(1e6).clamp_(-6e4, 6e4)
    x = cuda_images(model, 4)
    with pytest.raises(FloatingPointError, match=r"stage 1, block 0 \(mlp\).*precision='bf16'"):
        Engine(model, "fp16").check_finite(x)
    assert not bool(torch.isfinite(Engine(model, "fp16")(x)).all())
    assert bool(torch.isfinite(Engine(model, "bf16")(x)).all())

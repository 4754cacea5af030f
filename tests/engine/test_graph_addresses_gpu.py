"""Redirected graphs on a GPU: the bits of copying ones, memory, streams, many calls in flight."""

from __future__ import annotations

import functools

import pytest
import torch

from fastswin.engine import Engine
from fastswin.models import create_model

pytestmark = pytest.mark.gpu

NAME = "swin_tiny_patch4_window7_224"


@functools.cache
def model(name=NAME):
    torch.manual_seed(0)
    made = create_model(name, pretrained=False).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return made


def engines(precision="fp16", name=NAME, **arguments):
    """A redirecting engine, and one whose graphs copy."""
    made = [Engine(model(name), precision, **arguments) for _ in range(2)]
    made[1]._graphs.redirects = False
    return made


def images_for(engine, batch, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    config = engine.config
    return torch.randn(
        batch, config.in_channels, *config.image_size, device="cuda", dtype=engine.dtype,
        generator=generator,
    )  # fmt: skip


def captured(engine):
    """The graph used last."""
    return list(engine._graphs._graphs.values())[-1]


def assert_redirected(engine):
    assert engine.report().copies == ()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "tf32"])
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 32])
def test_logits_have_the_bits_of_copies(precision, batch):
    engine, copying = engines(precision)
    for seed in range(3):
        images = images_for(engine, batch, seed)
        before = images.clone()
        logits = engine(images)
        assert torch.equal(logits, copying(before))
        assert torch.equal(images, before)
        assert logits.untyped_storage().nbytes() == logits.nbytes
    assert_redirected(engine)
    assert captured(copying).addresses is None


@pytest.mark.parametrize("name", [NAME, "swinv2_tiny_window8_256"])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("batch", [1, 4])
def test_feature_maps_have_the_bits_of_copies(name, precision, batch):
    """Written by kernels in clusters, in place; whether redirected or not is the trial's."""
    engine, copying = engines(precision, name)
    kept = []
    for seed in range(3):
        images = images_for(engine, batch, seed)
        maps = engine.features(images)
        wanted = copying.features(images)
        kept.append((maps, wanted))
    for maps, wanted in kept:
        assert all(torch.equal(a, b) for a, b in zip(maps, wanted, strict=True))
    assert captured(engine).addresses is not None


def test_kernels_stay_in_clusters():
    """Batch 1 on compute capability 9.0 launches clusters, programmatically."""
    engine, copying = engines()
    if not any(stage.mlp == "clusters" for stage in engine.report(1).plan.stages):
        pytest.skip("this GPU runs no clusters")
    for seed in range(20):
        images = images_for(engine, 1, seed)
        assert torch.equal(engine(images), copying(images))
    torch.cuda.synchronize()
    assert_redirected(engine)


def test_images_of_the_capture_are_not_read():
    engine, _ = engines()
    engine(images_for(engine, 1))
    graph = captured(engine)
    graph.images.fill_(float("nan"))
    assert engine(images_for(engine, 1, seed=1)).isfinite().all()
    assert graph.images.isnan().all()


def test_earlier_results_stay():
    engine, copying = engines()
    results = [engine(images_for(engine, 1, seed)) for seed in range(10)]
    for seed, logits in enumerate(results):
        assert torch.equal(logits, copying(images_for(engine, 1, seed)))


def test_images_freed_after_the_call_and_memory_reused():
    engine, copying = engines()
    wanted = [copying(images_for(engine, 1, seed)) for seed in range(50)]
    results = []
    for seed in range(50):
        images = images_for(engine, 1, seed)
        size = images.shape
        results.append(engine(images))
        del images
        torch.full(size, float("nan"), device="cuda", dtype=engine.dtype)  # takes that memory
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.parametrize("batch", [1, 8])
def test_a_hundred_calls_in_flight(batch):
    """Changed addresses reach the launches behind the change and none before it."""
    engine, copying = engines()
    images = [images_for(engine, batch, seed) for seed in range(100)]
    wanted = [copying(x) for x in images]
    engine(images[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the calls are enqueued while nothing of them runs
    results = [engine(x) for x in images]
    assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
    assert_redirected(engine)


def test_two_streams():
    engine, copying = engines()
    images = [images_for(engine, 1, seed) for seed in range(2)]
    wanted = [copying(x) for x in images]
    streams = [torch.cuda.Stream() for _ in images]
    torch.cuda.synchronize()
    results = []
    for turn in range(60):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(engine(images[turn % 2]))
    torch.cuda.synchronize()
    for turn, logits in enumerate(results):
        assert torch.equal(logits, wanted[turn % 2]), f"turn {turn}"


@pytest.mark.parametrize("kind", ["strides", "misaligned", "dtype", "expanded"])
def test_images_that_are_copied(kind):
    engine, copying = engines(graph_batch_sizes=(2,))
    images = images_for(engine, 2)
    odd = {
        "strides": images.contiguous(memory_format=torch.channels_last),
        "misaligned": torch.cat((images.flatten()[:1], images.flatten()))[1:].view_as(images),
        "dtype": images.float(),
        "expanded": images[:1].expand(2, -1, -1, -1),
    }[kind]
    assert (kind == "misaligned") == (odd.data_ptr() % 16 != 0)
    wanted = copying(odd)
    for other in (images_for(engine, 2, seed=1), images_for(engine, 2, seed=2)[:1]):
        assert torch.equal(engine(odd), wanted)
        assert torch.equal(engine(other), copying(other))
    assert torch.equal(engine(odd), wanted)


def test_ladder_pieces_and_sizes():
    engine, copying = engines(graph_batch_sizes=(1, 4))
    for batch in (9, 5, 1, 3, 4):
        images = images_for(engine, batch, seed=batch)
        assert torch.equal(engine(images), copying(images))


def test_graphs_of_one_pool():
    """Trials and replays of other graphs leave results and graphs alone."""
    engine, copying = engines()
    kept = []
    for batch in (1, 4, 2, 1, 8, 4, 1):
        images = images_for(engine, batch, seed=len(kept))
        kept.append((engine(images), engine.features(images), images))
    for logits, maps, images in kept:
        assert torch.equal(logits, copying(images))
        for a, b in zip(maps, copying.features(images), strict=True):
            assert torch.equal(a, b)


def test_plain_pytorch_under_graphs():
    """Library kernels hold addresses inside structures; a copy node keeps them copying."""
    engine, copying = engines("fp16", impl="reference")
    for batch in (1, 32):
        for seed in range(2):
            images = images_for(engine, batch, seed)
            assert torch.equal(engine(images), copying(images))

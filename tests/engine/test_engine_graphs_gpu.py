"""CUDA graphs of an engine: the bits of plain calls, ladders, memory, weights taken anew."""

from __future__ import annotations

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny
from engine_gpu_cases import VERSIONS, cuda_images, eager_of, small

from fastswin.engine import Engine
from fastswin.engine import plans as plans_module

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch", [1, 64])
def test_graphs_survive_cleared_library_workspaces(batch):
    """torch.compile's graph mode frees cuBLAS workspaces; a replay must not write to them."""
    model = tiny(1, embed_dim=96, num_heads=(3, 6), image_size=(112, 112), window_size=7)
    engine = Engine(model, "fp16")
    images = images_like(model, batch).cuda()
    first = engine(images)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    canary = torch.full((64, 2**20), 7.0, device="cuda")  # takes what was freed
    for _ in range(3):
        assert torch.equal(engine(images), first)
    assert bool((canary == 7.0).all())


@VERSIONS
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_graphs_equal_eager_bitwise(version, precision):
    model = small(version)
    engine, eager = Engine(model, precision), eager_of(model, precision)
    for batch in (8, 1, 8):  # rungs of the ladder: both run the same plan
        x = cuda_images(model, batch)
        assert torch.equal(engine(x), eager(x))
        for a, b in zip(engine.features(x), eager.features(x), strict=True):
            assert torch.equal(a, b)
    assert len(engine.report().graphs) == 4


@VERSIONS
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_batches_between_rungs(version, precision):
    model = small(version)
    engine = Engine(model, precision, graph_batch_sizes=(8,))
    eight = engine(cuda_images(model, 8))
    for batch in (3, 8, 1, 5):
        x = cuda_images(model, 8)[:batch]
        assert torch.equal(engine(x), eight[:batch])
    assert len(engine.report().graphs) == 1
    assert engine(cuda_images(model, 8)[:0]).shape == (0, 7)


def test_batches_above_the_ladder():
    model = small()
    engine = Engine(model, graph_batch_sizes=(1, 4))
    x = cuda_images(model, 9)
    whole = torch.cat([engine(piece) for piece in x.split(4)])
    assert torch.equal(engine(x), whole)


@VERSIONS
def test_sizes_in_turn(version):
    model = small(version)
    engine = Engine(model)
    sizes = [(56, 84), (112, 168), (56, 84), (84, 56), (112, 168)]
    expected = {size: Engine(model)(cuda_images(model, 2, size)) for size in set(sizes)}
    for size in sizes:
        assert torch.equal(engine(cuda_images(model, 2, size)), expected[size])


def test_outputs_stay_valid():
    model = small()
    engine = Engine(model)
    first, maps = engine(cuda_images(model, 4)), engine.features(cuda_images(model, 4))
    kept = first.clone(), [m.clone() for m in maps]
    other = engine(cuda_images(model, 4, seed=3))
    engine.features(cuda_images(model, 4, seed=3))
    assert not torch.equal(other, kept[0])
    assert torch.equal(first, kept[0])
    assert all(torch.equal(a, b) for a, b in zip(maps, kept[1], strict=True))


def test_memory_is_flat_over_sizes():
    """Bounded graphs in one pool: the last 10 of 20 sizes reserve nothing more."""
    model = small()
    engine = Engine(model, max_graphs=4)
    sizes = [(56 + 4 * (i % 5), 84 - 4 * (i % 7)) for i in range(20)]
    sizes.sort(key=lambda size: -size[0] * size[1])  # so that a later size needs no more
    assert len(set(sizes)) == 20
    reserved = []
    for size in sizes:
        engine(cuda_images(model, 4, size))
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[10:]) <= reserved[9]
    assert len(engine.report().graphs) == 4


def test_dropped_graphs_and_plans_do_not_change_answers(monkeypatch):
    """Graphs outlive their plans and the other way round; what they read stays."""
    monkeypatch.setattr(plans_module, "MAX_PLANS", 2)
    model = small()
    engine = Engine(model, max_graphs=3, graph_batch_sizes=(1, 2, 4, 8))
    x = cuda_images(model, 8)
    expected = engine(x)
    for batch in (1, 2, 3, 4, 5, 6, 7):
        engine(x[:batch])
        filler = torch.randn(64, 1 << 12, device="cuda")  # takes over freed memory
        assert torch.equal(engine(x), expected)
        del filler
    assert len(engine.report(8).graphs) == 3


@VERSIONS
def test_refresh_under_graphs(version):
    model = small(version)
    engine = Engine(model)
    x = cuda_images(model, 4)
    before = engine(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.3)
    assert torch.equal(engine(x), before)
    engine.refresh()
    assert engine.report().graphs == ()
    after = engine(x)
    assert torch.equal(after, Engine(model)(x))
    assert largest_difference(after, before) > 1e-2


def test_report_lists_graphs():
    model = small()
    engine = Engine(model)
    engine(cuda_images(model, 3))
    engine.features(cuda_images(model, 4))
    report = engine.report(4)
    assert report.to_dict()["graphs"] == [
        ["logits", 4, [3, 56, 84]], ["features", 4, [3, 56, 84]],
    ]  # fmt: skip
    assert "2 CUDA graphs captured" in str(report)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_repeatable_bitwise(precision):
    model = small()
    engine = Engine(model, precision)
    x = cuda_images(model, 8)
    first = engine(x)
    assert all(torch.equal(engine(x), first) for _ in range(5))

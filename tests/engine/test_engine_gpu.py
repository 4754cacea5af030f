"""The engine on a GPU: accuracy gates at real sizes, graphs, streams, threads, memory."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny
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


VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
SMALL = {"image_size": (56, 84), "window_size": 7}


def small(version=1):
    return tiny(version, **SMALL)


def eager_of(model, precision="fp16"):
    """The same engine without graphs; ladders of one batch size give it the same plan."""
    return Engine(model, precision, cuda_graphs=False)


def cuda_images(model, batch, size=None, seed=0):
    return (images_like(model, batch, size) + 0.1 * seed).cuda()


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
    from fastswin.engine import engine as engine_module

    monkeypatch.setattr(engine_module, "MAX_PLANS", 2)
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


def test_side_stream():
    model = small()
    x = cuda_images(model, 4)
    expected = Engine(model)(x)
    engine, side = Engine(model), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = engine(x)
        second = engine(x)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_streams(graphs):
    """Interleaved calls share static buffers; each must see its own images."""
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    inputs = [cuda_images(model, 4, seed=s) for s in range(2)]
    expected = [eager_of(model)(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for turn in range(20):
        with torch.cuda.stream(streams[turn % 2]):
            results.append(engine(inputs[turn % 2]))
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert torch.equal(result, expected[turn % 2]), f"turn {turn}"


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_threads_on_two_streams(graphs):
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    inputs = [cuda_images(model, 4, size) for size in ((56, 84), (84, 112))]
    expected = [eager_of(model)(x) for x in inputs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results[index].append(engine(inputs[index]))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(r) for r in results] == [20, 20]
    for got, wanted in zip(results, expected, strict=True):
        assert all(torch.equal(r, wanted) for r in got)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_inside_a_capture_of_the_user(graphs):
    model = small()
    engine = Engine(model, cuda_graphs=graphs)
    static = cuda_images(model, 4)
    expected = [eager_of(model)(cuda_images(model, 4, seed=s)) for s in range(2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        engine(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = engine(static)
    for seed in range(2):
        static.copy_(cuda_images(model, 4, seed=seed))
        graph.replay()
        assert torch.equal(out, expected[seed])
    assert torch.equal(engine(cuda_images(model, 4)), expected[0])


def test_a_capture_without_a_call_before_is_refused():
    model = small()
    engine = Engine(model)
    x = cuda_images(model, 4)
    refused = None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        try:
            engine(x)
        except RuntimeError as error:
            refused = error
    assert "call it once with these shapes before capturing" in str(refused)
    assert torch.equal(engine(x), eager_of(model)(x))


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


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_repeatable_bitwise(precision):
    model = small()
    engine = Engine(model, precision)
    x = cuda_images(model, 8)
    first = engine(x)
    assert all(torch.equal(engine(x), first) for _ in range(5))

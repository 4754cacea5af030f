"""Quantised engines on a GPU: native kernels, graphs, mixes, memory, accuracy at real sizes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from engine_cases import images_like, largest_difference, tiny
from quantized_cases import AWKWARD, MIXED, PER_TOKEN, check_layers, relative_rms
from swin_references import perturb

from fastswin import quant
from fastswin.engine import Engine
from fastswin.engine.bind import bind
from fastswin.models import create_model
from fastswin.quant import QuantizedSwin

pytestmark = pytest.mark.gpu

MODELS = {
    "swin-tiny": "swin_tiny_patch4_window7_224",
    "swin-base-384": "swin_base_patch4_window12_384",
    "swinv2-tiny": "swinv2_tiny_window8_256",
}
PRECISIONS = ("int8", "int8_mode1", "int8_mode2", "fp8")


@pytest.fixture(autouse=True)
def exact_references():
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


class Case:
    """A model on the CPU and on the GPU, what it was seen to need, images, fp32 logits."""

    def __init__(self, model, batch: int = 4) -> None:
        self.model = model.eval()
        self.on_gpu = copy.deepcopy(model).cuda()
        self.images = images_like(model, batch).cuda()
        self.seen = quant.observe(self.on_gpu, images_like(model, 8).flip(0).cuda())
        with torch.no_grad():
            self.exact = self.on_gpu(self.images)

    def calibration(self, scheme):
        return quant.calibration_of(self.model, self.seen, scheme)

    def engine(self, precision: str, scheme=None, **arguments) -> Engine:
        calibration = self.calibration(scheme or precision)
        return Engine(self.model, precision, calibration=calibration, **arguments)

    def reference(self, scheme) -> QuantizedSwin:
        return QuantizedSwin(copy.deepcopy(self.on_gpu), self.calibration(scheme))


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def case(request):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Case(perturb(create_model(request.param, pretrained=False)))


@pytest.fixture(scope="module")
def small():
    return Case(tiny(1, **AWKWARD, depths=(2, 1)))


@pytest.mark.parametrize("mix", ["auto", "scheme"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_errors_are_those_of_the_integer_reference(case, precision, mix):
    engine = case.engine(precision, mix=mix)
    logits = engine(case.images)
    assert logits.dtype == torch.float16
    allowed = relative_rms(case.reference(precision)(case.images), case.exact)
    assert relative_rms(logits, case.exact) <= 1.5 * allowed


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_layer_is_within_one_step(case, precision, record_property):
    """What fp8 sums lose goes into the report, ``pytest --junit-xml``, and to ``pytest -rP``."""
    engine = case.engine(precision, mix="scheme")
    reference = QuantizedSwin(case.model, case.calibration(precision))
    compared = check_layers(engine, reference, case.images)
    assert compared.keys() >= {"qkv", "proj", "fc1", "fc2", "merge"}
    for layer, far in compared.items():
        record_property(f"beyond_one_step_{layer}", f"{far:.2e}")
        print(f"{precision} {layer}: {far:.2e} of the RMS beyond one step")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_the_mlp_in_one_kernel_at_many_rows(case, precision):
    """Swin-T has 12,544 rows of 192 channels at 16 images, Swin-B 147,456 of 128; V2 has none."""
    images = case.images.repeat(4, 1, 1, 1)
    engine = case.engine(precision)
    has_one = "in one kernel" in str(engine.report(len(images)))
    assert has_one == (case.model.config.version == 1)
    logits = engine(images)
    plain = case.engine(precision, cuda_graphs=False)
    assert torch.equal(logits, plain(images))
    allowed = relative_rms(case.reference(precision)(case.images), case.exact)
    assert relative_rms(logits[:4], case.exact) <= 1.5 * allowed


@pytest.mark.parametrize("scheme", ["int8", "int8_mode1", "fp8", PER_TOKEN, MIXED],
                         ids=["int8", "mode1", "fp8", "per-token", "mixed"])  # fmt: skip
def test_awkward_dimensions_run_on_kernels(small, scheme):
    """24 channels, 15 classes, maps that are no multiple of the window."""
    precision = scheme if isinstance(scheme, str) else "int8"
    engine = small.engine(precision, scheme, mix="scheme", impl="triton")
    assert engine(small.images[:0]).shape == (0, 15)
    allowed = relative_rms(small.reference(scheme)(small.images), small.exact)
    for batch in (1, 3, 4):
        logits = engine(small.images[:batch])
        assert relative_rms(logits, small.exact[:batch]) <= 2.0 * allowed


@pytest.mark.parametrize("precision", ["int8", "int8_mode1", "fp8"])
def test_graphs_replay_what_runs_without_them(small, precision):
    graphs = small.engine(precision, mix="scheme")
    plain = small.engine(precision, mix="scheme", cuda_graphs=False)
    for batch in (4, 1, 4):
        assert torch.equal(graphs(small.images[:batch]), plain(small.images[:batch]))
    first = graphs(small.images)
    kept = first.clone()
    graphs(small.images.flip(0))
    assert torch.equal(first, kept)
    graphs.refresh()
    assert torch.equal(graphs(small.images), kept)


def test_warmup_compiles_what_calls_launch(small):
    import triton

    engine = small.engine("int8", mix="scheme")
    assert engine.warmup([1, 4]) > 5
    compiled = []
    hooks = triton.knobs.runtime
    before = hooks.jit_post_compile_hook
    hooks.jit_post_compile_hook = lambda **event: compiled.append(event)
    try:
        for batch in (1, 3, 4):
            engine(small.images[:batch])
    finally:
        hooks.jit_post_compile_hook = before
    assert compiled == []


@pytest.mark.parametrize("mix", ["auto", "scheme"])
@pytest.mark.parametrize("precision", ["int8", "int8_mode1", "fp8"])
def test_programmatic_launch_changes_no_bit(case, precision, mix):
    """Batch 1: kernels that begin before their predecessor is done, three times, in a stream."""
    engine = case.engine(precision, mix=mix, pdl=True)
    images = case.images[:1].to(engine.dtype)
    bound = engine._plans.bound(1, case.model.config.image_size)
    ahead = bound.plan
    assert ahead.pdl
    stages = tuple(dataclasses.replace(stage, pdl=False) for stage in ahead.stages)
    forward = engine._forward
    plain = bind(
        dataclasses.replace(ahead, pdl=False, stages=stages), forward.weights, forward.precision
    )
    with torch.no_grad(), engine.own_numerics():
        wanted = forward.logits(images, plain)
        for _ in range(3):
            assert torch.equal(forward.logits(images, bound), wanted)
    assert torch.equal(engine(images), wanted)


def test_bf16_stream(small):
    engine = small.engine("int8", mix="scheme", wide_dtype=torch.bfloat16)
    logits = engine(small.images)
    assert logits.dtype == torch.bfloat16
    half = Engine(small.model, "bf16")(small.images)
    allowed = relative_rms(small.reference("int8")(small.images), small.exact)
    allowed += relative_rms(half, small.exact)
    assert relative_rms(logits, small.exact) <= 1.5 * allowed


def test_the_mix_keeps_wide_what_brings_no_speed(case):
    engine = case.engine("int8")
    few = engine.report(1).quantized_layers
    many = engine.report(32).quantized_layers
    assert int(few.partition("/")[0]) < int(many.partition("/")[0])
    assert "wide:" in str(engine.report(1))


def peak_mib(engine, images):
    engine(images)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine(images)
    return torch.cuda.max_memory_allocated() / 2**20


def test_weights_take_half_the_memory(case):
    if case.model.config.embed_dim < 128:
        half = 0.65  # tables and what stays wide weigh more in a small model
    else:
        half = 0.60
    images = case.images.repeat(2, 1, 1, 1)
    wide = Engine(case.model, "fp16", cuda_graphs=False)
    peak_wide = peak_mib(wide, images)
    mib = wide.report().weights_mib
    del wide
    engine = case.engine("int8", mix="scheme", cuda_graphs=False)
    peak = peak_mib(engine, images)
    assert engine.report(len(images)).weights_mib <= half * mib
    assert peak <= peak_wide


def test_refused_by_name(small):
    with pytest.raises(quant.QuantizationError, match="precision 'fp8' needs calibration="):
        Engine(small.model, "fp8")
    with pytest.raises(ValueError, match=r"wide_dtype must be one of .* got torch.float32"):
        Engine(small.model, "int8", wide_dtype=torch.float32)
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        with pytest.raises(ValueError, match=r"'fp8' needs compute capability 8\.9"):
            Engine(small.model, "fp8")


def test_evaluation_runs_the_engine(small):
    from fastswin.evaluation import evaluate_precisions

    calibrations = {name: small.calibration(name) for name in ("int8", "fp8")}
    labels = small.exact.argmax(1).cpu()
    scores = evaluate_precisions(
        copy.deepcopy(small.model), ["int8", "fp8"], [(small.images, labels)], device="cuda",
        calibrations=calibrations,
    )  # fmt: skip
    for name in ("int8", "fp8"):
        error = largest_difference(small.reference(name)(small.images), small.exact)
        assert 0 < scores[name].max_abs_diff <= 3 * error
        assert scores[name].non_finite == 0

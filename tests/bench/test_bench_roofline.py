"""FLOPs against the published tables, floors against hand counts, problem lists, sources."""

import math

import pytest
import torch

from fastswin import ops
from fastswin.bench.compile_cache import warm_compile_cache
from fastswin.bench.correctness import Gate, judge
from fastswin.bench.problems import SUITES, Problem, make_problems, seeded_images
from fastswin.bench.roofline import (
    Ceilings,
    measure_ceilings,
    roofline_ms,
    swin_flops,
    swin_fused_bytes,
    swin_weights,
)
from fastswin.bench.source import SourceCache, build_source
from fastswin.models import SwinConfig, SwinTransformer, find_variant

# multiply-adds per image in 1e9, as the official repository publishes them
PUBLISHED_GMACS = {
    "swin_tiny_patch4_window7_224": 4.5,
    "swin_small_patch4_window7_224": 8.7,
    "swin_base_patch4_window7_224": 15.4,
    "swin_base_patch4_window12_384": 47.1,
    "swin_large_patch4_window7_224": 34.5,
    "swin_large_patch4_window12_384": 103.9,
    "swin_tiny_c24_patch4_window8_256": 5.9,
    "swinv2_tiny_window8_256": 5.9,
    "swinv2_small_window8_256": 11.5,
    "swinv2_base_window8_256": 20.3,
    "swinv2_tiny_window16_256": 6.6,
    "swinv2_small_window16_256": 12.6,
    "swinv2_base_window16_256": 21.8,
    "swinv2_large_window12to16_192to256": 47.5,
    "swinv2_base_window12to24_192to384": 54.7,
    "swinv2_large_window12to24_192to384": 115.4,
}

# ms at 700 TFLOP/s and 3.02 TB/s, the design's table of floors
H100 = Ceilings(3.02, {"fp16": 700.0})
FLOORS_MS = {
    ("swin_tiny_patch4_window7_224", 32): 0.41,
    ("swin_tiny_patch4_window7_224", 64): 0.82,
    ("swin_base_patch4_window7_224", 1): 0.07,
    ("swin_base_patch4_window7_224", 32): 1.41,
    ("swin_large_patch4_window12_384", 1): 0.30,
    ("swinv2_base_window16_256", 32): 2.0,
}


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_flops_are_the_published_ones(name):
    gmacs = swin_flops(find_variant(name), 3) / 3 / 2e9
    assert gmacs == pytest.approx(PUBLISHED_GMACS[name], rel=0.02)


@pytest.mark.parametrize(("name", "batch"), FLOORS_MS)
def test_floor(name, batch):
    floor = roofline_ms(find_variant(name), batch, "fp16", H100)
    assert floor == pytest.approx(FLOORS_MS[name, batch], rel=0.03)


def test_bytes_by_hand():
    """One stage of one block: 4x6 tokens of 8 channels, no padding."""
    config = SwinConfig(image_size=(16, 24), embed_dim=8, depths=(1,), num_heads=(2,),
                        window_size=(4, 6), num_classes=5)  # fmt: skip
    stream, images = 4 * 6 * 8, 3 * 16 * 24
    weights = 48 * 8 + 12 * 8 * 8 + 7 * 11 * 2 + 8 * 5
    assert swin_weights(config) == weights
    activations = images + stream + 22 * stream + stream + 8 + 5
    assert swin_fused_bytes(config, 2, 2) == 2 * (2 * activations + weights)
    saved = (22 - 5) * stream * 2 * 2
    assert swin_fused_bytes(config, 2, 2) - swin_fused_bytes(config, 2, 2, 2) == saved


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_weights_are_nearly_all_parameters(name):
    """What is left out: norms, biases and V2's bias MLP, under 2 %."""
    with torch.device("meta"):
        total = sum(p.numel() for p in SwinTransformer(find_variant(name)).parameters())
    assert swin_weights(find_variant(name)) == pytest.approx(total, rel=0.02)


def test_padding_counts_in_attention():
    base = dict(embed_dim=8, depths=(1,), num_heads=(2,), num_classes=0)
    padded = SwinConfig(image_size=(20, 24), window_size=(4, 6), **base)
    grown = swin_flops(padded, 1) - swin_flops(padded.replace(image_size=(16, 24)), 1)
    linear = 6 * 8 * (4 * 8 + 2 * 32) + 6 * 48 * 8
    assert grown == 2 * (linear + 2 * 24**2 * 8)


def test_ceilings_are_measured_here(monkeypatch):
    monkeypatch.setattr("fastswin.bench.roofline.COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr("fastswin.bench.roofline.GEMM_SIDE", {"cpu": 32})
    monkeypatch.setattr("fastswin.bench.timing.WARMUP_S", 0.0)
    ceilings = measure_ceilings(torch.device("cpu"), ["fp32", "fp32"], seconds=0.01)
    assert 0 < ceilings.copy_tbs < 10
    assert set(ceilings.gemm_tflops) == {"fp32"}
    assert 0 < ceilings.gemm_tflops["fp32"] < 10


@pytest.mark.parametrize("suite", SUITES)
def test_default_problems(suite):
    problems = make_problems(suite)
    assert len(problems) == len(SUITES[suite]) * 2 * 4
    assert {p.dtype for p in problems} == {"fp16", "bf16"}
    assert {p.batch for p in problems} == {1, 8, 32, 64}
    assert {p.swin_config.version for p in problems} == {2 if suite == "model_v2" else 1}


def test_a_checkpoint_fits_one_model():
    with pytest.raises(ValueError, match="checkpoint fits one model"):
        make_problems("model", checkpoint="weights.safetensors")


def test_images_are_distinct_and_repeatable(tiny_problem):
    images = seeded_images(tiny_problem, 4, torch.device("cpu"), 5)
    assert torch.equal(images, seeded_images(tiny_problem, 4, torch.device("cpu"), 5))
    assert len({image.sum().item() for image in images}) == 4


@pytest.mark.parametrize("version", [1, 2])
def test_no_parameter_is_left_at_a_default(tiny_problem, version):
    config = tiny_problem.swin_config.replace(version=version)
    model = build_source(Problem("tiny", "fp32", 1, config)).engine_source
    for name, parameter in model.named_parameters():
        assert parameter.unique().numel() > 0.9 * parameter.numel(), name
        assert not parameter.requires_grad


def test_reference_runs_no_kernel_of_ours(tiny_problem, monkeypatch):
    """The answer that contenders are checked against comes from PyTorch alone."""
    asked = []
    attention = ops.window_attention

    def spy(*arguments, impl="auto", **options):
        asked.append(impl)
        return attention(*arguments, impl=impl, **options)

    source = build_source(tiny_problem)
    monkeypatch.setattr("fastswin.bench.source.ops.window_attention", spy)
    images = seeded_images(tiny_problem, 2, torch.device("cpu"), 0)
    logits = source.model(images)
    assert asked == ["reference"] * sum(tiny_problem.swin_config.depths)
    assert torch.allclose(logits, source.engine_source(images), atol=1e-5)


def test_source_cache_builds_a_model_once(tiny_problem):
    cache = SourceCache()
    first = cache.get(tiny_problem)
    assert cache.get(Problem("tiny", "fp16", 7, tiny_problem.config)) is first
    other = cache.get(Problem("tiny", "fp16", 7, tiny_problem.config.replace(num_classes=4)))
    assert other is not first


def test_checkpoint_is_loaded_or_refused(tiny_problem, tmp_path):
    path = tmp_path / "weights.pt"
    saved = build_source(tiny_problem).engine_source
    with torch.no_grad():
        saved.head.bias.fill_(7.0)
    torch.save(saved.state_dict(), path)
    problem = Problem("tiny", "fp32", 2, tiny_problem.config, str(path))
    assert build_source(problem).engine_source.head.bias.eq(7.0).all()
    torch.save({"head.bias": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="does not fit"):
        build_source(problem)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        build_source(problem)


def make_judged(margin, error):
    """One image whose two best logits are ``margin`` apart, answered with the winner lowered."""
    reference = torch.tensor([[1.0 + margin, 1.0, 0.0]])
    gate = Gate(torch.zeros(1), reference, max_abs=0.01, rel_rms=None, min_top1=1.0)
    return judge(reference - torch.tensor([[error, 0.0, 0.0]]), gate)


def test_undecided_images_do_not_count():
    tie = make_judged(margin=0.001, error=0.005)
    assert (tie.failure, tie.decided, tie.top1) == (None, 0, 1.0)
    wrong = make_judged(margin=0.5, error=0.6)
    assert (wrong.decided, wrong.top1) == (1, 0.0)
    assert "max abs error 0.6 is over the gate 0.01" in wrong.failure


def test_nan_is_never_within_a_gate():
    reference = torch.ones(1, 3)
    gate = Gate(torch.zeros(1), reference, max_abs=math.inf, rel_rms=None, min_top1=0.0)
    answer = judge(torch.tensor([[1.0, math.nan, 1.0]]), gate)
    assert answer.failure == "1 logits are NaN or infinite"


def test_compile_failures_ahead_are_told_and_absent():
    problem = Problem("swin_tiny_patch4_window7_224", "fp16", 1)
    lines = []
    found = warm_compile_cache(
        [problem], 1, variants=["compile", "eager"], timeout_s=-1.0, progress=lines.append
    )
    assert found == {}
    assert lines == [f"not compiled ahead: {problem} compile: no time left"]
    with pytest.raises(ValueError, match="workers must be at least 1"):
        warm_compile_cache([problem], 0)

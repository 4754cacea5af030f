"""Small batches: forms of few rows, and programmatic dependent launch, which changes no bit."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin import ops
from fastswin.engine import Engine
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.small_batch import NORM_BEHIND, SMALL_TILES
from fastswin.engine.stage_choice import SMALL_STAGE_VALUES
from fastswin.models import create_model
from fastswin.models.variants import find_variant
from fastswin.ops.linear.config import GemmConfig, OneShotConfig, one_shot_blocker
from fastswin.ops.split_k.config import SplitKConfig, config_blocker

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
SMALL = {"depths": (2, 1), "image_size": (12, 20), "window_size": 2}


@pytest.fixture
def hopper(monkeypatch) -> torch.device:
    """A GPU of compute capability 9.0 to the planner, which asks it nothing else."""
    monkeypatch.setattr("fastswin.engine.plan.why_not_triton", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.stage_choice.hopper_reason", lambda *_: {})
    monkeypatch.setattr("fastswin.engine.stage_choice.measured_config", lambda *_: None)
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _: (9, 0))
    for module in ("plan", "stage_choice"):
        monkeypatch.setattr(f"fastswin.engine.{module}.multiprocessor_count", lambda _: 132)
    return torch.device("cuda")


def planned(version: int, batch: int, pdl: bool | None, **changes: object):
    model = tiny(version, **(SMALL | changes))
    size = model.config.image_size
    return model, make_plan(model.config, batch, size, CPU, HALF, "triton", None, pdl)


def check_plan(model, plan) -> None:
    """Logits under the plan are as close to the fp32 model's as those of the model in fp16."""
    images = images_like(model, 1)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half()).float()
        weights = prepare(model, CPU, torch.float16)
        forward = Forward(model.config, weights, HALF)
        logits = forward.logits(images.half(), bind(plan, weights, HALF)).float()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()


def test_narrow_forms_of_few_rows_answer_as_the_model_does():
    """Odd maps, shifted windows, padded windows; also merging and head in one kernel each."""
    model, plan = planned(1, 1, True)
    assert {(s.qkv, s.proj, s.mlp) for s in plan.stages} == {("fused", "fused", "split")}
    assert plan.pdl
    for stage in plan.stages:
        kinds = {name: type(tiles) for name, tiles in stage.launch.items()}
        assert kinds == dict.fromkeys(("qkv", "proj", "fc2"), OneShotConfig)
    stages = (dataclasses.replace(plan.stages[0], merge="fused"), *plan.stages[1:])
    check_plan(model, dataclasses.replace(plan, stages=stages, head="fused"))


def wide_forms(plan):
    """What stages of more channels than a tiny model has take."""
    words = {"qkv": "tiled", "mlp": "split-k", "launch": {}}
    return dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(stage, **words) for stage in plan.stages)
    )


def test_wide_forms_of_few_rows_answer_as_the_model_does():
    """fc2's sums are joined by the next block's LayerNorm, by a kernel alone at a stage's end."""
    model, plan = planned(1, 1, True)
    check_plan(model, wide_forms(plan))


def test_forms_of_few_rows_of_v2_answer_as_the_model_does():
    model, plan = planned(2, 1, True)
    assert {(s.qkv, s.proj, s.mlp) for s in plan.stages} == {("tiled", "fused", "split-k")}
    assert plan.head == "tiled"
    check_plan(model, plan)


@pytest.mark.parametrize("form", ["narrow", "wide"])
def test_calls_are_noted_without_running_them(form):
    model, plan = planned(1, 1, True, depths=(2, 1), image_size=(16, 16))
    plan = dataclasses.replace(plan, head="fused") if form == "narrow" else wide_forms(plan)
    weights = prepare(model, CPU, torch.float16)
    case = (
        Forward(model.config, weights, HALF), bind(plan, weights, HALF),
        images_like(model, 1).half(),
    )  # fmt: skip
    quiet, real = record_calls(*case, execute=False), record_calls(*case)
    assert [(c.stage, c.layer, c.result.shape) for c in quiet] == [
        (c.stage, c.layer, c.result.shape) for c in real
    ]
    assert {c.layer for c in quiet} == {
        "embed", "qkv", "attention", "proj", "fc1", "fc2", "merge", "head",
        *(("norm", "pool") if form == "wide" else ()),
    }  # fmt: skip
    assert all(c.kwargs["pdl"] is True for c in quiet if c.name.startswith("ops."))


def test_only_small_stages_change_and_only_on_request_without_hopper():
    _, auto = planned(1, 1, None)
    assert (auto.pdl, auto.head, auto.stages[0].proj) == (False, "library", "library")
    config = create_model("swin_tiny_patch4_window7_224", pretrained=False).config
    plan = make_plan(config, 8, (224, 224), CPU, HALF, "triton", None, True, fused_attention={})
    values = [8 * s.map_size[0] * s.map_size[1] * s.channels for s in plan.stages]
    assert [s.proj for s in plan.stages] == [
        "fused" if count <= SMALL_STAGE_VALUES else "library" for count in values
    ]
    assert [s.qkv for s in plan.stages][-1] == "tiled"
    assert {s.proj for s in plan.stages} == {"fused", "library"}


@pytest.mark.parametrize(
    ("name", "norm2", "one_shot"),
    [
        ("swin_tiny_patch4_window7_224", ["apart", "behind", "behind", "apart"],
         [{"qkv", "proj", "fc1", "fc2"}, {"proj", "fc1"}, {"proj", "fc1"}, {"proj"}]),
        ("swin_large_patch4_window7_224", ["apart"] * 4, [set(), {"proj"}, set(), set()]),
        ("swinv2_tiny_window8_256", ["apart"] * 4,
         [{"proj", "fc1"}, {"proj", "fc1"}, {"proj", "fc1"}, {"proj"}]),
    ],
    ids=["tiny", "large", "v2"],
)  # fmt: skip
def test_layers_that_measured_tiles_change_at_batch_1(name, norm2, one_shot):
    """Swin-L's stage 3 has Swin-T's last channels in four times the rows: its proj stays."""
    config = find_variant(name)
    plan = make_plan(config, 1, config.image_size, CPU, HALF, "triton", None, True)
    assert [s.norm2 for s in plan.stages] == norm2
    kinds = [{k for k, t in s.launch.items() if isinstance(t, OneShotConfig)} for s in plan.stages]
    assert kinds == one_shot
    plain = make_plan(config, 1, config.image_size, CPU, HALF, "triton", None, False)
    assert {s.norm2 for s in plain.stages} == {"apart"}


def test_measured_tiles_can_run():
    for (version, layer, C), ranges in SMALL_TILES.items():
        assert version in (1, 2)
        inputs = C * {"qkv": 1, "proj": 1, "fc1": 1, "fc2": 4, "merge": 4}[layer]
        assert [most for most, _ in ranges] == sorted({most for most, _ in ranges})
        assert ranges[-1][1] is not None
        for rows, tiles in ranges:
            if tiles is None:
                continue
            assert layer != "proj" or C % tiles.block_n == 0  # it may leave statistics of columns
            assert rows % 49 == 0 or rows % 64 == 0
            if isinstance(tiles, OneShotConfig):
                assert one_shot_blocker(inputs) is None
            elif isinstance(tiles, SplitKConfig):
                assert layer == "fc2"
                assert config_blocker(tiles, inputs) is None
            else:
                assert tiles.tma
                assert inputs % tiles.block_k == 0
    assert {(1, "fc1", C) for C in NORM_BEHIND} <= SMALL_TILES.keys()


@pytest.mark.parametrize(
    ("name", "stage", "tiles"),
    [
        ("swin_tiny_patch4_window7_224", 0,
         {"qkv": OneShotConfig(64, 64, 4), "fc1": OneShotConfig(64, 64, 4)}),
        ("swin_small_patch4_window7_224", 2, {"fc2": SplitKConfig(3, 64, 64, 8)}),
        ("swin_large_patch4_window7_224", 1, {"fc1": GemmConfig(64, 64, 64, 4, 4, True)}),
        ("swin_large_patch4_window7_224", 2,
         {"fc1": GemmConfig(64, 64, 128, 4, 3, True), "fc2": SplitKConfig(6, 64, 128, 8)}),
        ("swin_base_patch4_window7_224", 2,
         {"proj": OneShotConfig(32, 64, 8), "fc2": SplitKConfig(8, 64, 64, 8)}),
        ("swinv2_base_window16_256", 2, {"fc1": OneShotConfig(64, 64, 8)}),
    ],
    ids=["tiny-1", "small-3", "large-2", "large-3", "base-3", "v2-base-3"],
)  # fmt: skip
def test_tiles_that_whole_models_chose_at_batch_1(name, stage, tiles, hopper):
    config = find_variant(name)
    launch = make_plan(config, 1, config.image_size, hopper, HALF, "triton", None, True)
    assert {layer: launch.stages[stage].launch[layer] for layer in tiles} == tiles
    twice = make_plan(config, 2, config.image_size, hopper, HALF, "triton", None, True)
    assert not tiles.items() & twice.stages[stage].launch.items()


def test_swin_t_keeps_its_last_stage_from_swin_l(hopper):
    """Of the same 768 channels, in 49 rows where Swin-L has 196."""
    config = find_variant("swin_tiny_patch4_window7_224")
    last = make_plan(config, 1, config.image_size, hopper, HALF, "triton", None, True).stages[3]
    assert "fc1" not in last.launch
    assert last.launch["fc2"] == SplitKConfig(8, 64, 64, 4)


def test_a_first_stage_of_more_rows_is_launched_plainly_by_default(hopper):
    """SwinV2-B's stages of 64x64 to 8x8 tokens: 524,288 values are too many for small forms."""
    config = find_variant("swinv2_base_window16_256")
    auto, asked = (
        make_plan(config, 1, config.image_size, hopper, HALF, "triton", None, pdl)
        for pdl in (None, True)
    )
    assert [s.few_rows for s in auto.stages] == [False, True, True, True]
    assert [s.pdl for s in auto.stages] == [False, True, True, True]
    assert [s.pdl for s in asked.stages] == [True] * 4
    assert auto.pdl


@pytest.mark.parametrize(
    ("capability", "held"), [((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_small_forms_need_the_shared_memory_of_their_tiles(capability, held, hopper, monkeypatch):
    """Slices of 512 channels take 128 KB and more; compute capability 12.0 has 99 a program."""
    monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda device: capability)
    config = find_variant("swin_tiny_patch4_window7_224")
    for pdl in (None, True):
        plan = make_plan(config, 1, config.image_size, hopper, HALF, "triton", None, pdl)
        assert {s.few_rows for s in plan.stages} == {held}
    assert plan.pdl


def test_wide_precisions_have_neither():
    model = tiny(1, **SMALL)
    plan = make_plan(
        model.config, 1, model.config.image_size, CPU, PRECISIONS["fp32"], "triton", None, True
    )
    assert not plan.pdl
    assert {s.proj for s in plan.stages} == {"library"}


def measured_tiles():
    """Every entry once: version, layer, channels, most rows, tiles."""
    for (version, layer, C), ranges in SMALL_TILES.items():
        yield from ((version, layer, C, most, tiles) for most, tiles in ranges if tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("version", "layer", "C", "rows", "tiles"),
    list(measured_tiles()),
    ids=lambda v: type(v).__name__ if dataclasses.is_dataclass(v) else str(v),
)
def test_measured_tiles_are_right_and_repeat_themselves(version, layer, C, rows, tiles, dtype):
    """Full and one row less; three runs on poisoned memory; against fp64, as eager's error."""
    wide = {"qkv": (3, 1), "proj": (1, 1), "fc1": (4, 1), "fc2": (1, 4), "merge": (2, 4)}[layer]
    N, K = (factor * C for factor in wide)
    generator = torch.Generator("cuda").manual_seed(C)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weight, bias = (randn(N, K) * K**-0.5).to(dtype), randn(N)
    for M in (rows, rows - 1):
        x, residual = randn(M, K).to(dtype), randn(M, N).to(dtype)

        def product(wanted: torch.dtype, x=x, residual=residual) -> torch.Tensor:
            y = torch.nn.functional.linear(x.to(wanted), weight.to(wanted))
            if layer == "fc2":
                return y
            y = y + bias.to(wanted)
            if layer == "fc1":
                y = torch.nn.functional.gelu(y)
            return y + residual.to(wanted) if layer == "proj" else y

        def run(x=x, residual=residual, M=M) -> torch.Tensor:
            poisoned = torch.full((2**22,), float("nan"), device="cuda")
            del poisoned
            if layer == "fc2":
                return ops.split_k_linear(x, weight, impl="triton", config=tiles, pdl=True)
            return ops.linear(
                x, weight, bias, activation="gelu" if layer == "fc1" else None,
                residual=residual if layer == "proj" else None, impl="triton", config=tiles,
                out=torch.full((M, N), float("nan"), device="cuda", dtype=dtype), pdl=True,
            )  # fmt: skip

        found = [run() for _ in range(3)]
        assert all(torch.equal(found[0], other) for other in found[1:])
        y = found[0].sum(0) if layer == "fc2" else found[0]
        truth, eager = product(torch.float64), product(dtype).double()
        assert (y.double() - truth).abs().max() <= 2 * (eager - truth).abs().max()
        assert (y.double() - truth).norm() <= 2 * (eager - truth).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"], ids=["v1", "v2"]
)
def test_programmatic_launch_changes_no_bit(name, batch):
    """The same forms launched plainly and programmatically; three runs each, in graphs too."""
    device = torch.device("cuda")
    model = create_model(name, pretrained=False).eval().to(device)
    config = model.config
    plan = make_plan(config, batch, config.image_size, device, HALF, "triton", None, True)
    plain = dataclasses.replace(
        plan, pdl=False, stages=tuple(dataclasses.replace(s, pdl=False) for s in plan.stages)
    )
    weights = prepare(model, device, torch.float16)
    forward = Forward(config, weights, HALF)
    images = images_like(model, batch).half().to(device)
    with torch.no_grad():
        expected = forward.logits(images, bind(plain, weights, HALF))
        bound = bind(plan, weights, HALF)
        torch.cuda.synchronize()
        for _ in range(3):
            assert torch.equal(forward.logits(images, bound), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward.logits(images, bound)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "plain calls"])
def test_streams_do_not_disturb_each_other(cuda_graphs):
    """Two engines on two streams at once, and results that other work follows directly."""
    name = "swin_tiny_patch4_window7_224"
    model = create_model(name, pretrained=False).eval()
    engines = [Engine(model, pdl=True, cuda_graphs=cuda_graphs) for _ in range(2)]
    images = [images_like(model, batch).half().cuda() for batch in (1, 2)]
    expected = [engine(x) for engine, x in zip(engines, images, strict=True)]
    streams = [torch.cuda.Stream() for _ in engines]
    torch.cuda.synchronize()
    for _ in range(20):
        sums = []
        for engine, x, stream in zip(engines, images, streams, strict=True):
            with torch.cuda.stream(stream):
                sums.append(engine(x) * 1)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))

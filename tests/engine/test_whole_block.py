"""Blocks as one kernel inside the engine's forward: the plan's words, the stream, whole models."""

from __future__ import annotations

import copy
import math
import types

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin import Engine
from fastswin._triton import cluster
from fastswin.engine import operators
from fastswin.engine.bind import bind
from fastswin.engine.calls import record_calls
from fastswin.engine.forward import Forward
from fastswin.engine.plan import make_plan
from fastswin.engine.precision import PRECISIONS
from fastswin.engine.prepare import prepare
from fastswin.engine.whole_block import WHOLE_BLOCKS
from fastswin.models import create_model
from fastswin.models.variants import find_variant
from fastswin.ops.swin_block.config import swin_block_blocker
from fastswin.ops.swin_block.packing import PackedBlock
from fastswin.ops.swin_block.reference import swin_block_ref

CPU = torch.device("cpu")
HALF = PRECISIONS["fp16"]
#: Two and four heads of 32 channels on maps of 14x21 and 7x11 tokens; the second is padded.
BLOCKS = {"embed_dim": 64, "num_heads": (2, 4), "depths": (2, 2), "image_size": (56, 84)}


def plan_of(name: str, batch: int, table: dict | None = None, size=None, precision="fp16"):
    config = find_variant(name)
    return make_plan(
        config, batch, size or config.image_size, CPU, PRECISIONS[precision], "triton",
        fused_attention={}, whole_blocks=WHOLE_BLOCKS if table is None else table,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "batch", "stages"),
    [
        ("swin_tiny_patch4_window7_224", 1, [0]),
        ("swin_tiny_patch4_window7_224", 2, [0]),
        ("swin_tiny_patch4_window7_224", 3, []),
        ("swin_small_patch4_window7_224", 1, [0]),
        ("swin_base_patch4_window7_224", 1, []),
        ("swin_large_patch4_window7_224", 1, []),
        ("swinv2_tiny_window8_256", 2, [0, 1]),
        ("swinv2_tiny_window8_256", 3, []),
        ("swinv2_tiny_window16_256", 1, []),
    ],
    ids=str,
)
def test_stages_that_the_engine_table_takes(name, batch, stages):
    found = plan_of(name, batch).stages
    assert [s.stage for s in found if s.attention == "block"] == stages
    for stage in found:
        words = {stage.qkv, stage.proj, stage.mlp}
        assert (words == {"inside"}) == (stage.attention == "block")
        if stage.attention == "block":
            assert set(stage.launch) <= {"merge"}
            assert "a cluster of" in stage.reasons["mlp"]


def test_every_stage_of_the_table_has_a_kernel():
    for (version, C), windows in WHOLE_BLOCKS.items():
        window = (7, 7) if version == 1 else (8, 8)
        assert swin_block_blocker(C, C // 32, 4 * C, window, (window[0], 7 * window[1])) is None
        assert windows > 0


def test_a_map_that_windows_do_not_tile_says_why():
    stage = plan_of("swin_tiny_patch4_window7_224", 1, size=(200, 224)).stages[0]
    assert stage.attention == "triton"
    assert "no multiple of a window" in stage.reasons["block"]


def test_full_precision_and_other_cards_take_separate_kernels(monkeypatch):
    name = "swin_tiny_patch4_window7_224"
    assert plan_of(name, 1, precision="fp32").stages[0].attention == "triton"
    config = find_variant(name)
    for kind, capability, taken in (
        ("cuda", (9, 0), True), ("cuda", (10, 0), False), ("cuda", (8, 9), False),
        ("cpu", (9, 0), False),
    ):  # fmt: skip
        monkeypatch.setattr("fastswin.engine.plan.device_capability", lambda _, c=capability: c)
        monkeypatch.setattr("fastswin._triton.cluster.interpreting", lambda: False)
        monkeypatch.setattr(
            "fastswin.engine.form_tables.why_no_clusters",
            lambda _, c, kind=kind: why_no_clusters(kind, c),
        )
        plan = make_plan(config, 1, config.image_size, CPU, HALF, "triton")
        assert (plan.stages[0].attention == "block") == taken, (kind, capability)
        decided = make_plan(
            config, 1, config.image_size, CPU, HALF, "triton", fused_attention={}
        )  # fmt: skip
        assert decided.stages[0].attention == "triton"


def why_no_clusters(kind: str, capability: tuple[int, int]) -> str | None:
    return cluster.why_no_clusters(kind, capability)


def unpacked(weights: PackedBlock, table: torch.Tensor, C: int, tokens: int):
    """Layers of a packed block, and the dense bias without what softmax does not see."""
    rows = weights.heads.view(C // 32, 4, 32, C).transpose(0, 1).reshape(4 * C, C)
    layers = (
        (rows[: 3 * C], weights.qkv_bias), (rows[3 * C :], weights.proj_bias),
        (weights.fc1, weights.fc1_bias), (weights.fc2, weights.fc2_bias),
    )  # fmt: skip
    return layers, table[0, :, :tokens, :tokens].float() / math.log2(math.e)


@pytest.mark.parametrize("version", [1, 2])
def test_answers_as_the_model_does(version):
    """With the reference in the kernel's place, on what the kernel is given."""

    def block(x, weights, table, head_scale, scale, window, shift, eps, *, out, pdl):
        C = x.shape[3]
        layers, bias = unpacked(weights, table, C, window[0] * window[1])
        none = (None, None)
        temperature = None if head_scale is None else (head_scale / math.log2(math.e)).log()
        return out.copy_(
            swin_block_ref(
                x, *layers, bias, None, weights.norm1 or none, weights.norm2 or none, C // 32,
                window, shift, scale, temperature, eps,
            )
        )  # fmt: skip

    model = tiny(version, **BLOCKS, window_size=7)
    config = model.config
    plan = make_plan(
        config, 2, config.image_size, CPU, HALF, "triton", fused_attention={},
        whole_blocks={(version, 64): 12, (version, 128): 100},
    )  # fmt: skip
    assert [s.attention for s in plan.stages] == ["block", "triton"]
    images = images_like(model, 2)
    with torch.no_grad():
        truth = model(images)
        eager = copy.deepcopy(model).half()(images.half()).float()
        weights = prepare(model, CPU, torch.float16)
        plain = {name: getattr(operators, name) for name in operators.__all__}
        stand_in = types.SimpleNamespace(**plain | {"packed_swin_block": block})
        bound = bind(plan, weights, HALF)
        logits = Forward(config, weights, HALF, stand_in).logits(images.half(), bound).float()
        calls = record_calls(Forward(config, weights, HALF), bound, images.half(), execute=False)
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    blocks = [call for call in calls if call.layer == "block"]
    assert [call.count for call in blocks] == [1, 1]  # unshifted, shifted
    assert {call.layer for call in calls if call.stage == 0} <= {"block", "merge", "norm"}


def test_a_quantised_engine_keeps_layers_to_quantise():
    model = tiny(1, **BLOCKS, window_size=7)
    engine = Engine(model, "fp16", device="cpu", backend="torch")
    assert {s.attention for s in engine.report(1).plan.stages} <= {"triton", "reference"}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("name", "stages"),
    [("swin_tiny_patch4_window7_224", 1), ("swinv2_tiny_window8_256", 2)],
    ids=["v1", "v2"],
)
def test_whole_models_on_the_card(name, stages, precision):
    """Launched programmatically and in a graph: gates of the whole model, three runs bitwise."""
    device = torch.device("cuda")
    torch.manual_seed(5)
    model = create_model(name, pretrained=False).eval().to(device)
    with torch.no_grad():
        for parameter in model.parameters():  # V2's norms begin at 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    images = images_like(model, 1).to(device)
    engine = Engine(model, precision)
    words = [s.attention for s in engine.report(1).plan.stages]
    assert words[:stages] == ["block"] * stages
    dtype = PRECISIONS[precision].dtype
    with torch.no_grad():
        truth = model(images)
        eager = model.to(dtype)(images.to(dtype)).float()
    logits = engine(images.to(dtype)).float().clone()
    assert (logits - truth).abs().max() <= 1.5 * (eager - truth).abs().max()
    for _ in range(3):
        assert torch.equal(engine(images.to(dtype)).float(), logits)

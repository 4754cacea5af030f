"""All blocks of a stage in one kernel: phase by phase in the interpreter, whole on a GPU.

Interpreted programs run one after another and would wait at a barrier forever. There each phase is
a launch, with the end of the launch for a barrier; the code between two barriers is the same.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from persistent_cases import in_dtype, make_block

from fastswin import ops
from fastswin.ops.persistent_stage import launch
from fastswin.ops.persistent_stage.config import (
    PersistentStageConfig,
    StageShape,
    persistent_stage_blocker,
    pieces,
)
from fastswin.ops.persistent_stage.packing import half_table, pack_stage
from fastswin.ops.window_attention.packing import pack_bias
from fastswin.testing.tolerance import assert_close_to_oracle

SMALL = PersistentStageConfig(proj=(16, 16), fc1=(32, 64), fc2=(16, 16), splits=2)
ON_GPU = torch.cuda.is_available()


@pytest.fixture
def few_processors(monkeypatch):
    """The interpreter's stand-in for a GPU, with so few that programs take several rows."""
    if not ON_GPU:
        monkeypatch.setattr(launch, "multiprocessor_count", lambda device: 12)


def check(x, blocks, **options):
    """Kernel (in place, and on a GPU beside), eager and oracle on the same inputs."""
    kernel = {"impl": "triton", "config": SMALL}
    first = x.clone()
    assert ops.persistent_stage(first, blocks, **options, out=first, **kernel) is first
    again = [ops.persistent_stage(x, blocks, **options, **kernel) for _ in range(2 * ON_GPU)]
    assert all(torch.equal(first, other) for other in again)
    wide = [in_dtype(block, torch.float64) for block in blocks]
    oracle = ops.persistent_stage(x.double(), wide, **options, impl="reference")
    eager = ops.persistent_stage(x, blocks, **options, impl="reference")
    assert_close_to_oracle(first, eager, oracle, x.dtype)


def test_two_blocks(randn, few_processors):
    """The second is shifted, and hands on through every phase what the first has left."""
    blocks = [make_block(randn, 48, 3, 16, shifted=shifted) for shifted in (False, True)]
    x = randn(1, 4, 8, 48, dtype=torch.float16, spread=2.0) + 1
    check(x, blocks, num_heads=3, window_size=(4, 4), shift_size=(2, 2))


def test_two_images_no_biases_wide_windows(randn, few_processors):
    """Rows that are no whole tile, padded tokens of a window, one part of channels."""
    block = make_block(randn, 32, 2, 6, shifted=True, biases=False)
    x = randn(2, 2, 6, 32, dtype=torch.float16) + 40
    check(x, [block], num_heads=2, window_size=(2, 3), shift_size=(1, 0))


def test_reference_is_the_blocks_one_after_another(randn):
    """Against the formula written out with other operators, fp64."""
    blocks = [in_dtype(make_block(randn, 32, 2, 16, shifted=s), torch.float64) for s in (0, 1)]
    x = randn(1, 4, 8, 32).double()
    options = {"num_heads": 2, "window_size": (4, 4), "shift_size": (2, 2)}
    y = ops.persistent_stage(x, blocks, **options)
    for block in blocks:
        qkv = F.linear(F.layer_norm(x, (32,)), block.qkv_weight, block.qkv_bias)
        attended = ops.window_attention(
            qkv, num_heads=2, window_size=(4, 4), shift_size=(2, 2) if block.shifted else (0, 0),
            bias=block.bias, impl="reference",
        )  # fmt: skip
        x = x + F.linear(attended, block.proj_weight, block.proj_bias)
        h = F.gelu(F.linear(F.layer_norm(x, (32,)), block.fc1_weight, block.fc1_bias))
        x = x + F.linear(h, block.fc2_weight, block.fc2_bias)
    torch.testing.assert_close(y, x, rtol=0, atol=1e-12)


def test_every_piece_has_one_program():
    """Each phase of Swin-T's and Swin-B's third stage, and what does not fit a GPU."""
    shape = StageShape(1, (14, 14), 384, 12, 1536, (7, 7), (3, 3))
    default = PersistentStageConfig()
    assert persistent_stage_blocker(shape, default, 132) is None
    assert pieces(shape, default, 132) == {
        "norm": 98, "attend": 48, "project": 78, "expand": 84, "shrink": 84, "join": 98,
    }  # fmt: skip
    assert "84 pieces, more than 80" in str(persistent_stage_blocker(shape, default, 80))


REFUSED = {
    "map": ({"map_size": (14, 15)}, "no whole number"),
    "window": ({"window_size": (14, 14)}, "196 tokens a window exceed 64"),
    "heads": ({"num_heads": 6 * 16}, "head_dim must be one of"),
    "channels": ({"channels": 160, "num_heads": 5, "hidden": 640}, "three times a power of two"),
    "slices": ({"hidden": 1400}, "350 channels are not one or two powers of two"),
    "batch": ({"batch": 8}, "attend has 384 pieces"),
    "shared memory": ({"channels": 768, "num_heads": 24, "hidden": 3072}, "operands of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(name):
    changes, message = REFUSED[name]
    fits = {
        "batch": 1, "map_size": (14, 14), "channels": 384, "num_heads": 12, "hidden": 1536,
        "window_size": (7, 7), "shift_size": (3, 3),
    }  # fmt: skip
    blocker = persistent_stage_blocker(StageShape(**(fits | changes)), PersistentStageConfig(), 132)
    assert message in str(blocker)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proj": (16, 48)}, "columns of proj must be a power of two"),
        ({"fc2": (8, 64)}, "rows of fc2 must be a power of two"),
        ({"splits": 5}, "not one or two powers|splits must divide"),
    ],
    ids=["columns", "rows", "splits"],
)
def test_tiles_are_checked(changes, message):
    shape = StageShape(1, (14, 14), 384, 12, 1536, (7, 7))
    x, config = torch.zeros(1, 14, 14, 384), PersistentStageConfig(**changes)
    with pytest.raises(ValueError, match=message):
        launch.prepare_launch(x, None, shape, 1.0, 1e-5, config)


def test_arguments_are_checked(randn):
    block = make_block(randn, 32, 2, 16)
    x = randn(1, 4, 4, 32, dtype=torch.float16)
    options = {"num_heads": 2, "window_size": (4, 4)}
    with pytest.raises(ValueError, match="at least one block"):
        ops.persistent_stage(x, [], **options)
    with pytest.raises(ValueError, match=r"qkv_weight of block 1 must be \(96, 32\)"):
        ops.persistent_stage(x, [block, make_block(randn, 16, 2, 16)], **options)
    with pytest.raises(ValueError, match="shift < window"):
        ops.persistent_stage(x, [block], **options, shift_size=(4, 0))
    with pytest.raises(ValueError, match=r"bias of block 0 must be \(2, 8, 8\)"):
        ops.persistent_stage(x, [block], num_heads=2, window_size=(2, 4))
    with pytest.raises(RuntimeError, match="float32 products are faster"):
        ops.persistent_stage(x.float(), [block], **options, impl="triton")
    assert ops.persistent_stage(x[:0], [block], **options).shape == (0, 4, 4, 32)


def test_weights_must_be_aligned(randn):
    block = make_block(randn, 32, 2, 16)
    shifted = torch.empty(32 * 32 + 1, dtype=torch.float16)[1:].view(32, 32)
    table = pack_bias(None, 2, (4, 4), (0, 0), torch.device("cpu"))
    crooked = in_dtype(block, torch.float16)
    object.__setattr__(crooked, "proj_weight", shifted)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        pack_stage([crooked], [table])


def test_tables_of_any_size_fit_fp16():
    """Softmax over a row is that of the fp32 table, whatever a row has in common."""
    bias = torch.tensor([0.0, 3.0, 9.0e4, -2.0e5]).repeat(2, 4, 1)
    bias[1] = torch.arange(16.0).view(4, 4) - 7.5e4
    packed = pack_bias(bias, 2, (2, 2), (0, 0), torch.device("cpu"))
    half = half_table(packed)
    assert half.dtype == torch.float16
    assert half_table(half) is half
    expected = torch.softmax(packed.double() * math.log(2), -1)
    actual = torch.softmax(half.double() * math.log(2), -1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("C", "heads"), [(384, 12), (512, 16)], ids=["swin_t", "swin_b"])
def test_whole_stage(C, heads, dtype, randn):
    """Barriers: the same bits as phases apart, in three runs and in 100 replays of a graph."""
    blocks = [make_block(randn, C, heads, 49, shifted=s, dtype=dtype) for s in (False, True)]
    x = randn(1, 14, 14, C, dtype=dtype, spread=2.0) + 1
    options = {"num_heads": heads, "window_size": (7, 7), "shift_size": (3, 3)}
    runs = [ops.persistent_stage(x, blocks, **options, impl="triton") for _ in range(3)]
    assert all(torch.equal(runs[0], run) for run in runs)
    wide = [in_dtype(block, torch.float64) for block in blocks]
    oracle = ops.persistent_stage(x.double(), wide, **options, impl="reference")
    eager = ops.persistent_stage(x, blocks, **options, impl="reference")
    assert_close_to_oracle(runs[0], eager, oracle, dtype)
    packed = pack_stage(
        blocks, [pack_bias(b.bias, heads, (7, 7), (3, 3) if b.shifted else (0, 0), x.device)
                 for b in blocks],
    )  # fmt: skip
    shape = StageShape(1, (14, 14), C, heads, 4 * C, (7, 7), (3, 3))
    arguments = packed, shape, (C // heads) ** -0.5, 1e-5
    assert math.isfinite(runs[0].float().sum().item())
    apart = launch.persistent_stage_fwd(x.clone(), *arguments, apart=True)
    assert torch.equal(apart, runs[0])
    stream, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.copy_(x)
        launch.persistent_stage_fwd(stream, *arguments)
    for _ in range(100):
        graph.replay()
        assert torch.equal(stream, runs[0])

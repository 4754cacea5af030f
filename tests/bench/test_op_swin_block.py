"""The bench of blocks in clusters: its check, its copies and its command, on a CPU."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fastswin.bench import op_swin_block
from fastswin.bench.op_swin_block import Stage, _with_own_weights, lines, main, run
from fastswin.models import SwinTransformer
from fastswin.models.config import SwinConfig

CPU = torch.device("cpu")


def a_stage(version: int = 1, index: int = 0) -> Stage:
    config = SwinConfig(
        version=version, embed_dim=64, num_heads=(2, 4), depths=(2, 2), image_size=(56, 56),
        window_size=7, num_classes=7,
    )  # fmt: skip
    torch.manual_seed(3)
    model = SwinTransformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # V2's norms begin at 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    return Stage(model, index, CPU)


@pytest.mark.parametrize("version", [1, 2])
@torch.no_grad()
def test_separate_launches_pass_the_check_and_a_mistake_does_not(version):
    stage = a_stage(version)
    x, bound = stage.stream(2), stage.plan(2, False)
    assert stage.check(x, bound) == ""
    stage.weights.stages[0][1].fc2.weight[0, 0] += 1.0
    assert "error" in stage.check(x, bound)


@torch.no_grad()
def test_a_chain_of_copies_is_a_chain_of_the_blocks():
    stage = a_stage()
    bound, blocks = stage.plan(1, False), stage.weights.stages[0]
    copies = [_with_own_weights(block) for block in blocks]
    for block, other in zip(blocks, copies, strict=True):
        assert block.qkv.weight.data_ptr() != other.qkv.weight.data_ptr()
    first, second = stage.stream(1), stage.stream(1)
    stage.run(first, bound, blocks)
    stage.run(second, bound, copies)
    assert torch.equal(first, second)


@torch.no_grad()
def test_a_stage_without_the_kernel_says_why():
    stage = a_stage(index=1)  # a map of 7x7 tokens: one window of 128 channels
    found = list(lines(stage, "tiny", 1))
    assert len(found) == 1
    assert found[0].startswith("tiny stage 1 batch 1: no block in one kernel: ")


def test_a_wrong_case_makes_the_run_fail(tmp_path):
    model = a_stage().model
    with (
        mock.patch.object(op_swin_block, "build", return_value=model),
        mock.patch.object(op_swin_block, "lines", return_value=["tiny: WRONG"]),
    ):
        said: list[str] = []
        assert not run(CPU, tmp_path, ["tiny"], [1], 60.0, said.append)
    assert said == ["tiny: WRONG"] * 2  # two stages
    assert (tmp_path / "swin_block.txt").read_text() == "tiny: WRONG\n" * 2


@pytest.mark.parametrize("batches", ["0", "-1", "a", ""])
def test_batches_are_checked(batches, capsys):
    with pytest.raises(SystemExit):
        main(["--batches", batches])
    assert "--batches must be" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys):
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert main([]) == 2
    assert "there is no GPU" in capsys.readouterr().out

"""Gradients averaged over processes during the backward pass; the other process is a stand-in."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny_swins import CLASSES, our_model
from torch import nn

from fastswin import accelerate, capture_training
from fastswin.accelerate import averaging
from fastswin.accelerate.averaging import GradientAverage, _in_buckets

#: The stand-in's gradients are this many times ours, so that averages of two are twice ours.
OTHER = 3.0


class Reduced:
    """A collective under way: the sum appears when it is waited for, and not before."""

    def __init__(self, tensor: torch.Tensor, log: list[str]) -> None:
        self.tensor, self.log = tensor, log

    def wait(self) -> None:
        self.tensor.mul_(1.0 + OTHER)
        self.log.append("waited")


@pytest.fixture
def log(monkeypatch):
    """What was asked of torch.distributed, in a group of two."""
    asked: list[str] = []

    def all_reduce(tensor, operation, *, group, async_op):
        assert (operation, group, async_op) == (averaging.dist.ReduceOp.SUM, "group", True)
        asked.append(f"reduced {tensor.numel()}")
        return Reduced(tensor, asked)

    monkeypatch.setattr(averaging.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(averaging.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(averaging.dist, "all_reduce", all_reduce)
    return asked


def gradients(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    upstream = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(3))
    wanted = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(model(images), wanted, upstream))


def test_every_gradient_of_a_swin_is_averaged_while_the_pass_goes_on(log):
    torch.manual_seed(0)
    model = our_model(1, (28, 20), depths=(2, 2), num_heads=(1, 2), embed_dim=32)
    model.patch_embed.requires_grad_(False)
    accelerate(model.train())
    images = torch.randn(2, 3, 28, 20)
    own = gradients(model, images)
    average = GradientAverage(model.parameters(), "group", bucket_bytes=2**16)
    with average.installed():
        for _ in range(2):
            log.clear()
            got = gradients(model, images)
            assert all(torch.equal(mine, 2 * alone) for mine, alone in zip(got, own, strict=True))
            sent = [line for line in log if line.startswith("reduced")]
            assert len(sent) > 3
            assert log == sent + ["waited"] * len(sent)  # none waits before all have started
            assert sum(int(line.split()[1]) for line in sent) == sum(g.numel() for g in own)
    log.clear()
    after = gradients(model, images)
    assert log == []
    assert all(torch.equal(a, b) for a, b in zip(after, own, strict=True))


def test_a_pass_that_leaves_parameters_out_is_an_error(log):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    average = GradientAverage(model.parameters(), "group")
    with (
        pytest.raises(RuntimeError, match="did not reach every parameter"),
        average.installed(),
    ):
        torch.autograd.grad(model(torch.randn(2, 3)).sum(), list(model[1].parameters()))
    assert log == []


def test_an_error_within_is_not_covered_up(log):
    model = nn.Linear(3, 4)
    with (
        pytest.raises(KeyError),
        GradientAverage(model.parameters(), "group").installed(),
    ):
        raise KeyError


def test_buckets_hold_one_dtype_from_the_last_parameter_on():
    sizes = [(10, torch.float32), (10, torch.float32), (4, torch.bfloat16), (90, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(n, dtype=d)) for n, d in sizes]
    first, second, half, large = parameters
    found = _in_buckets(parameters, limit=100)
    assert [[id(p) for p in bucket] for bucket in found] == [
        [id(large)], [id(half)], [id(second), id(first)]
    ]  # fmt: skip
    assert [len(b) for b in _in_buckets(parameters, limit=40)] == [1, 1, 1, 1]


@pytest.mark.gpu
def test_captured_steps_average_in_their_graphs(tmp_path):
    """A group of one: its averages are its own gradients, through NCCL, inside the graphs."""
    dist = torch.distributed
    models, steps = [], []
    images = torch.randn(4, 3, 56, 40, device="cuda")
    upstream = torch.randn(4, CLASSES, device="cuda")
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for group in (None, dist.group.WORLD):
            torch.manual_seed(0)
            model = our_model(1, (56, 40), depths=(2, 2), num_heads=(1, 2), embed_dim=32)
            model = model.cuda().train()
            accelerate(model)
            models.append(model)
            steps.append(
                capture_training(model, images, autocast=torch.bfloat16, process_group=group)
            )
        for _ in range(3):
            for model, step in zip(models, steps, strict=True):
                model.zero_grad(set_to_none=True)
                step(images).backward(upstream)
            for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
                assert mine.grad.abs().sum() > 0
                assert torch.equal(mine.grad, theirs.grad)
            images.normal_()

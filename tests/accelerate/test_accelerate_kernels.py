"""The same models with every kernel in the interpreter, and on a GPU at real sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_swins import build, images, logits, our_model

from fastswin import accelerate
from fastswin.testing.poison import PoisonEmpty


def step(model, x):
    model.zero_grad(set_to_none=True)
    y = logits(model, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y))
    return {"logits": y.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


class KnownDropPath(torch.nn.Module):
    """Drop path with given factors: a GPU draws other ones in fp64 than in fp32."""

    drop_prob = 0.4

    def __init__(self, *factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * x.new_tensor(self.factors).view(-1, *(1,) * (x.ndim - 1))


@pytest.mark.parametrize("version", [1, 2])
def test_every_kernel_of_a_model(version, device):
    """One stage, a plain and a shifted block: the interpreter takes seconds for a block."""
    torch.manual_seed(2)
    model = our_model(version, (24, 16), depths=(2,), num_heads=(1,), embed_dim=16)
    model.layers[0].blocks[0].drop_path = KnownDropPath(0.0, 1 / 0.6)
    model.layers[0].blocks[1].drop_path = KnownDropPath(1 / 0.6, 1 / 0.6)
    model, x = model.to(device).train(), torch.randn(2, 3, 24, 16, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    truth = step(copy.deepcopy(model).double(), x.double())
    accelerate(model, impl="triton")
    with PoisonEmpty():
        actual = step(model, x)
    largest = max(t.abs().max().item() for t in truth.values())
    for name, value in truth.items():
        bound = max(1e-5 * value.abs().max().item(), 1e-6 * largest)
        assert (actual[name] - value).abs().max() <= bound, name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_bf16_autocast_on_a_gpu(name):
    """Gradients as near to fp32 eager as eager's under autocast, half the memory, same stream."""
    from fastswin.models import create_model

    torch.manual_seed(0)
    plain = create_model(name, num_classes=10).cuda().train()
    side = plain.config.image_size[0]
    x = torch.randn(4, 3, side, side, device="cuda")
    results = {}
    for label in ("exact", "eager", "fused", "again"):
        model = copy.deepcopy(plain)
        accelerate(model, impl="reference" if label in ("exact", "eager") else "triton")
        with torch.autocast("cuda", torch.bfloat16, enabled=label != "exact"):
            y = model(x)
        y.float().square().sum().backward()
        results[label] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(results["fused"], results["again"])
    exact = results["exact"]
    wrong = {k: ((v - exact).norm() / exact.norm()).item() for k, v in results.items()}
    assert wrong["fused"] <= 1.5 * wrong["eager"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["timm V1", "timm V2", "torchvision V1", "transformers V1"])
def test_compiled_and_captured_on_a_gpu(case):
    model, x = build(case).cuda(), images(case).cuda()
    accelerate(model)
    expected = step(model, x)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad(set_to_none=True)
    y = logits(compiled, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-4)

"""Patch merging on the fused operator: values, and when a module keeps its own forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_swins import build, images, logits, microsoft_model, our_model, torchvision_model
from torch import nn

from fastswin import accelerate
from fastswin.accelerate.merging import FusedMerging, MapMergingV1, MapMergingV2
from fastswin.accelerate.swap import Options, fuse


def mergings(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "reduction")]


def step(module: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(upstream.to(y))
    return {"out": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("version", [1, 2])
def test_kernels_of_an_odd_map(version, randn):
    x, upstream = randn(2, 5, 4, 16), randn(2, 3, 2, 32)
    merging = mergings(our_model(version, (64, 32), embed_dim=16))[0].to(x.device)
    truth = step(copy.deepcopy(merging).double(), x.double(), upstream)
    fuse(merging, (MapMergingV1, MapMergingV2)[version - 1], Options(impl="triton"))
    actual = step(merging, x, upstream)
    assert actual.keys() == truth.keys()
    for name, value in truth.items():
        assert (actual[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_hooks_inside_are_called():
    model, x = build("timm V1").eval(), images("timm V1")
    expected = logits(model, x)
    (merging,) = mergings(model)
    seen = []
    handle = merging.norm.register_forward_hook(lambda *a: seen.append("before"))
    report = accelerate(model)
    kept = {k.name: k.reason for k in report.kept}
    assert kept == {"layers.1.downsample": "norm has hooks, which a fused block would not call"}
    assert not isinstance(merging, FusedMerging)
    assert "FusedLayerNorm" in type(merging.norm).__name__  # the norm by itself is
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert accelerate(model).kept == ()
    assert isinstance(merging, FusedMerging)
    merging.reduction.register_forward_hook(lambda *a: seen.append("after"))
    torch.testing.assert_close(logits(model, x), expected, rtol=1e-4, atol=1e-5)
    assert seen == ["before", "after"]


def test_other_layers_are_kept_with_a_reason():
    model = build("ours V1")
    mergings(model)[0].norm = nn.LayerNorm(24)
    (kept,) = accelerate(model).kept
    assert kept.reason == "norm covers (24,) channels, not (96,)"
    model = build("ours V1")
    mergings(model)[0].reduction = nn.Sequential(nn.Linear(96, 48))
    (kept,) = accelerate(model).kept
    assert kept.reason == "reduction is a Sequential, not a Linear"


def test_strangers_with_another_order_are_kept():
    model = microsoft_model(1, (64, 32))
    (merging,) = mergings(model)

    class RowsFirst(type(merging)):
        def forward(self, x):
            x = x.view(len(x), *self.input_resolution, -1)
            x = torch.cat([x[:, r::2, c::2] for r in (0, 1) for c in (0, 1)], -1).flatten(1, 2)
            return self.reduction(self.norm(x))

    merging.__class__ = RowsFirst
    (kept,) = accelerate(model).kept
    assert "its answer differs from a patch merging's" in kept.reason


def test_maps_of_other_channels_and_ranks():
    model = torchvision_model(1, (64, 48))
    accelerate(model)
    (merging,) = mergings(model)
    with pytest.raises(ValueError, match=r"x must be \[B, H, W, C\] with C = 24"):
        merging(torch.zeros(1, 4, 4, 8))
    single = torch.randn(5, 4, 24)  # torchvision takes any leading axes
    torch.testing.assert_close(merging(single), merging(single[None])[0], rtol=1e-4, atol=1e-5)

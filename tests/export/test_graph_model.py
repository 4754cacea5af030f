"""The rewritten model in window order, before any exporter sees it."""

from __future__ import annotations

import pytest
import torch
from swin_references import our_model

from fastswin.export.graph_model import GraphSwin


@pytest.mark.parametrize("features", [False, True], ids=["logits", "features"])
@pytest.mark.parametrize("size", [(64, 96), (70, 101), (32, 48)], ids=str)
@pytest.mark.parametrize("convention", ["timm", "torchvision", "microsoft"])
@pytest.mark.parametrize("version", [1, 2])
def test_window_order_is_the_readable_model(version, convention, size, features):
    model = our_model(
        version,
        window_convention=convention,
        depths=(2, 3),
        absolute_position_embedding=version == 1,
    )
    graph = GraphSwin(model, size, features=features)
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        actual = graph(images)
        expected = model.forward_features(images) if features else model(images)
    pairs = zip(actual, expected, strict=True) if features else [(actual, expected)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)

"""What an export may not do to its source, and operator sets that do not fit each other."""

from __future__ import annotations

import pytest
import torch
from swin_references import our_model

from fastswin.export import opset as opset_module
from fastswin.export.onnx import build_graph
from fastswin.export.opset import resolve_opset
from fastswin.export.source import open_model


def test_a_live_model_stays_as_it_was():
    live = our_model(1, image_size=(32, 16), depths=(2,), num_heads=(2,)).half().train()
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    opened, description, images = open_model(live)
    build_graph(opened, (32, 16))
    assert (description, images) == ("live SwinTransformer", None)
    assert not opened.training
    assert live.training
    for name, tensor in live.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])


def test_the_newest_opset_of_old_packages_is_checked_like_any_other(monkeypatch):
    monkeypatch.setattr(opset_module, "newest_opset", lambda: 22)
    assert resolve_opset("newest", "plain") == 22
    with pytest.raises(ValueError, match="attention='standard' needs opset 23 or later, got 22"):
        resolve_opset("newest", "standard")
    monkeypatch.setattr(opset_module, "newest_opset", lambda: 19)
    with pytest.raises(ValueError, match="opset must be at least 20, got 19"):
        resolve_opset("newest", "plain")

"""``ops.mlp`` asked for the MLP in clusters where it cannot run."""

from __future__ import annotations

import pytest
import torch
from mlp_cases import make_mlp

from fastswin import ops
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.mlp import api


def test_the_reason_is_told():
    made = make_mlp(8, 384)
    config = ClusterMlpConfig(64, 8)
    with pytest.raises(RuntimeError, match="clusters of programs need a GPU"):
        ops.mlp(**made, impl="triton", config=config)
    found = ops.mlp(**made, config=config)
    assert torch.equal(found, ops.mlp(**made, impl="reference"))


@pytest.mark.parametrize(
    ("C", "config", "reason"),
    [(384, ClusterMlpConfig(96, 8), "64 or 128 rows"), (192, ClusterMlpConfig(64, 8), "multiple")],
)
def test_tiles_that_are_not_legal(C, config, reason, monkeypatch):
    monkeypatch.setattr(api, "why_no_cluster_mlp", lambda *_: None)
    monkeypatch.setattr(api, "why_not_triton", lambda *_: None)
    with pytest.raises(RuntimeError, match=reason):
        ops.mlp(**make_mlp(8, C), impl="triton", config=config)

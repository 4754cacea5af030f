"""Candidates compile for a real card, from tensors without data, once for all row counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("compile_candidates.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("op", ["linear", "layer_norm_linear", "mlp", "window_attention"])
def test_a_candidate_compiles_within_the_cards_shared_memory(compiled, op):
    assert 0 < compiled[op]["shared_bytes"] <= compiled[op]["limit"], compiled[op]["config"]


@pytest.mark.parametrize("op", ["linear", "layer_norm_linear", "mlp", "window_attention"])
def test_more_rows_need_no_other_binary(compiled, op):
    assert compiled[op]["one_binary"]

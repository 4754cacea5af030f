"""Streamed MLPs on the card: against fp64, three runs, poisoned memory, all multiprocessors."""

from __future__ import annotations

import pytest
import torch
from mlp_cases import check, make_mlp

from fastswin import ops
from fastswin.ops.streamed_mlp.config import StreamedMlpConfig
from fastswin.ops.streamed_mlp.launch import streamed_mlp_fwd
from fastswin.testing.poison import PoisonEmpty

#: Rows, channels, and tiles: rows that fill the card several times, that end within a tile, few.
FORMS = [
    (25_088, 192, StreamedMlpConfig(3)), (60_001, 192, StreamedMlpConfig(3)),
    (6272, 192, StreamedMlpConfig(2, 2)), (8192, 192, StreamedMlpConfig(2, 2)),
    (30_000, 192, StreamedMlpConfig(2, 2)), (777, 192, StreamedMlpConfig(2)),
    (1, 192, StreamedMlpConfig(2, 2)), (20_000, 128, StreamedMlpConfig(3)),
    (8192, 128, StreamedMlpConfig(2, 2)), (50_176, 128, StreamedMlpConfig(3)),
    (12_544, 128, StreamedMlpConfig(2)),
    (25_088, 256, StreamedMlpConfig(2)), (3000, 256, StreamedMlpConfig(2)),
]  # fmt: skip

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("variant", ["v1", "v2", "v1 offset", "v2 offset"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_against_fp64(dtype, variant, form, cuda):
    M, C, config = form
    made = make_mlp(M, C, dtype=dtype, device=cuda, post_norm=variant.startswith("v2"))
    if variant.endswith("offset"):
        made["offset"] = torch.randn(C, device=cuda)
    runs = []
    for _ in range(3):
        with PoisonEmpty():
            runs.append(ops.mlp(**made, impl="triton", config=config))
    check(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_in_place_and_rows_behind_the_last(form, cuda):
    M, C, config = form
    made = make_mlp(M, C, device=cuda)
    room = torch.full((M + 192, C), float("nan"), device=cuda, dtype=torch.float16)
    room[:M] = made["x"]
    rows = room[:M]
    streamed_mlp_fwd(
        rows, (made["fc1_weight"], made["fc1_bias"]), (made["fc2_weight"], made["fc2_bias"]), None,
        None, made["eps"], rows, config, pdl=True,
    )  # fmt: skip
    check(rows, made)
    assert room[M:].isnan().all()


def test_rows_that_are_not_aligned_and_none(cuda):
    made = make_mlp(100, 192, device=cuda)
    config = StreamedMlpConfig(2, 2)
    memory = torch.empty(100 * 192 + 1, device=cuda, dtype=torch.float16)
    memory[1:] = made["x"].view(-1)
    odd = made | {"x": memory[1:].view(100, 192)}
    check(ops.mlp(**odd, impl="triton", config=config), made)  # another kernel takes them
    ops.mlp(**odd, out=odd["x"], impl="triton", config=config)
    check(odd["x"], made)
    empty = made | {"x": made["x"][:0]}
    assert ops.mlp(**empty, impl="triton", config=config).shape == (0, 192)

"""MLPs in clusters on the card: against fp64, three runs, poisoned memory, all multiprocessors."""

from __future__ import annotations

import pytest
import torch
from mlp_cases import check, make_mlp

from fastswin import ops
from fastswin.ops.cluster_mlp.config import ClusterMlpConfig, default_cluster_mlp_config
from fastswin.ops.cluster_mlp.launch import cluster_mlp_fwd
from fastswin.ops.cluster_mlp.weights import pack_weights
from fastswin.ops.linear.stats import write_stats_ref
from fastswin.testing.poison import PoisonEmpty

CUDA = torch.device("cuda")
TILES = ClusterMlpConfig(64, 8)

#: Rows, channels, rows of a cluster, its programs: all sizes of hidden units and of own rows.
FORMS = [
    (1568, 384, 128, 8), (784, 384, 64, 8), (1568, 512, 128, 8),
    (784, 512, 64, 8), (392, 768, 64, 16), (800, 256, 128, 8), (300, 256, 64, 4),
    (300, 256, 128, 4), (49, 512, 128, 16), (1, 384, 64, 8), (20_000, 384, 128, 8),
]  # fmt: skip


@pytest.fixture
def card():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("MLPs in clusters need compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("variant", ["v1", "v2", "offset"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_against_fp64(dtype, variant, form):
    M, C, block_m, programs = form
    made = make_mlp(M, C, dtype=dtype, device=CUDA, post_norm=variant == "v2")
    if variant == "offset":
        made["offset"] = torch.randn(C, device=CUDA)
    config = ClusterMlpConfig(block_m, programs)
    runs = []
    for _ in range(3):
        with PoisonEmpty():
            runs.append(ops.mlp(**made, impl="triton", config=config))
    check(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    in_place = made | {"x": made["x"].clone()}
    ops.mlp(**in_place, out=in_place["x"], impl="triton", config=config)
    assert torch.equal(in_place["x"], runs[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_statistics_that_it_leaves_and_rows_behind_the_last(form):
    M, C, block_m, programs = form
    made = make_mlp(M, C, device=CUDA)
    room = torch.full((M + 128, C), float("nan"), device=CUDA, dtype=torch.float16)
    room[:M] = made["x"]
    rows = room[:M]
    left = torch.full((2, C // 128, M), float("nan"), device=CUDA)
    packed = pack_weights(
        (made["fc1_weight"], made["fc1_bias"]), (made["fc2_weight"], made["fc2_bias"]), None,
        programs,
    )  # fmt: skip
    cluster_mlp_fwd(
        rows, packed.tiles, packed.fc1_sums, packed.fc1_bias, packed.fc2_bias, made["eps"], rows,
        ClusterMlpConfig(block_m, programs), True, stats_out=left,
    )  # fmt: skip
    check(rows, made)
    assert room[M:].isnan().all()
    wanted = torch.empty_like(left, dtype=torch.float64)
    write_stats_ref(rows, wanted)
    torch.testing.assert_close(left.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
def test_rows_that_are_not_aligned_and_none():
    made = make_mlp(100, 384, device=CUDA)
    memory = torch.empty(100 * 384 + 1, device=CUDA, dtype=torch.float16)
    memory[1:] = made["x"].view(-1)
    wanted = ops.mlp(**made, impl="triton", config=TILES)
    odd = made | {"x": memory[1:].view(100, 384)}
    assert torch.equal(ops.mlp(**odd, impl="triton", config=TILES), wanted)
    ops.mlp(**odd, out=odd["x"], impl="triton", config=TILES)
    assert torch.equal(odd["x"], wanted)
    empty = made | {"x": made["x"][:0]}
    assert ops.mlp(**empty, impl="triton", config=TILES).shape == (0, 384)


@pytest.mark.gpu
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("C", [384, 512, 768])
def test_default_tiles(C):
    made = make_mlp(400, C, device=CUDA)
    config = default_cluster_mlp_config(400, C)
    assert config is not None
    check(ops.mlp(**made, impl="triton", config=config), made)

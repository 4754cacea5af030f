"""Products in clusters on a card: values against fp64, the same bits in every run and every way."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cluster_linear_cases import (
    EPS,
    HALF,
    check,
    check_post_norm,
    check_stats,
    make_post_norm,
    make_product,
    room_for_stats,
    run_on_card,
    run_post_norm,
    with_ring,
)

from fastswin import ops
from fastswin.ops.cluster_linear.choice import (
    MEASURED,
    MEASURED_POST_NORM,
    default_cluster_linear_config,
    default_post_norm_config,
)
from fastswin.ops.cluster_linear.config import ClusterLinearConfig

pytestmark = pytest.mark.gpu

#: Rows of a map of Swin: one window, a stage of one image, at 384, batches.
ROWS = (49, 196, 576)

#: (rows, columns, inputs) of every range of measured tiles: its last number of rows.
SHAPES = [(row[0], *shape) for shape, ranges in MEASURED.items() for row in ranges]

#: Every wide tile and number of programs that share it, in the narrowest steps; then narrow tiles
#: and wide steps, in both orders; then tiles of rows and of columns that share copies, up to 16
#: programs a cluster.
TILES = [
    *itertools.product((64, 128), (64, 128), (1, 2, 4, 8), (64,)),
    (16, 64, 1, 64), (16, 64, 2, 128), (16, 128, 1, 128), (16, 128, 2, 256), (32, 64, 1, 256),
    (32, 64, 2, 64), (32, 64, 4, 128), (32, 128, 1, 64), (32, 128, 4, 64), (64, 64, 1, 256),
    (64, 128, 8, 128), (128, 64, 2, 128),
    (64, 64, 1, 64, 2, 1), (64, 64, 1, 64, 1, 2), (64, 64, 1, 64, 4, 4), (64, 64, 1, 128, 3, 2),
    (64, 128, 1, 64, 2, 2), (64, 128, 4, 64, 2, 1), (64, 128, 2, 64, 2, 2), (64, 64, 8, 64, 2, 1),
    (128, 64, 1, 128, 1, 4), (128, 64, 4, 64, 2, 2), (128, 128, 1, 64, 4, 1),
    (32, 64, 1, 128, 4, 2), (32, 64, 2, 64, 2, 2), (16, 128, 1, 64, 2, 2), (16, 64, 2, 128, 1, 4),
]  # fmt: skip


def check_every_way(made, config):
    """Three runs, which leave statistics: two into NaN, one in place where there is a residual."""
    M, N = len(made["x"]), len(made["weight"])
    runs, stats = [], []
    for number in range(3):
        out, given = made["x"].new_full((M, N), float("nan")), made
        if number == 2 and "residual" in made:
            out = made["residual"].clone()
            given = made | {"residual": out}
        stats.append(room_for_stats(M, N, config, out.device))
        assert run_on_card(given, config, out=out, stats_out=stats[-1]) is out
        runs.append(out)
    check(runs[0], made)
    check_stats(stats[0], runs[0])
    assert all(torch.equal(runs[0], other) for other in runs[1:])
    assert all(torch.equal(stats[0], other) for other in stats[1:])
    return runs[0]


def form_of(K, N):
    """What stands around a product in a block: a norm before qkv and fc1, a residual after others.

    fc1, which widens by four, has GELU.
    """
    if N > K:
        return {"parts": K // 64, "gelu": N == 4 * K}
    return {"residual": True}


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_measured_tiles(shape, dtype, cuda):
    M, N, K = shape
    made = make_product(M, N, K, **form_of(K, N), dtype=dtype, device=cuda)
    check_every_way(made, default_cluster_linear_config(M, N, K))


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_choices_for_the_rows_of_images(shape, M, cuda):
    """One dtype a number of rows: nearly all are the tiles above."""
    N, K = shape
    dtype = torch.bfloat16 if M == 196 else torch.float16
    made = make_product(M, N, K, **form_of(K, N), dtype=dtype, device=cuda)
    check_every_way(made, default_cluster_linear_config(M, N, K))


@pytest.mark.parametrize("M", [1, 63, 65, 129, 784, 1568])
@pytest.mark.parametrize(("N", "K"), [(192, 128), (640, 320), (1344, 448), (448, 1344)])
def test_choices_of_the_model(N, K, M, cuda):
    """Shapes of no variant, rows of no tile."""
    made = make_product(M, N, K, bias=False, residual=True, device=cuda)
    check_every_way(made, default_cluster_linear_config(M, N, K))


@pytest.mark.parametrize("form", ["norm", "residual"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, form, cuda):
    """Some of the last tile's rows, six steps; rings of as many slots as fit and of two."""
    splits, block_k, M, N = *tile[2:4], 177, 256
    K = 6 * block_k * splits
    norm = {"parts": 3, "gelu": True}, torch.float16
    around, dtype = norm if form == "norm" else ({"residual": True}, torch.bfloat16)
    made = make_product(M, N, K, **around, dtype=dtype, device=cuda, offset=10.0)
    full = with_ring(K, *tile)
    found = [
        check_every_way(made, dataclasses.replace(full, slots=slots)) for slots in {full.slots, 2}
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("around", ["norm", "residual"])
@pytest.mark.parametrize(
    "tile",
    [(64, 128, 1, 64), (128, 128, 1, 64), (64, 128, 2, 64), (64, 64, 4, 64), (128, 64, 1, 128),
     (32, 64, 1, 128), (64, 128, 1, 64, 3, 1), (64, 128, 2, 64, 2, 2)],
    ids=str,
)  # fmt: skip
def test_rings_of_any_length_give_the_same_bits(tile, around, cuda):
    """Seven steps in two slots, in as many as fit, and in all between, launched ahead."""
    K = 7 * tile[3] * tile[2]
    form = {"parts": 7, "gelu": True} if around == "norm" else {"residual": True}
    made = make_product(144, 512, K, **form, device=cuda, offset=10.0)
    full = with_ring(K, *tile)
    found = []
    for slots in range(2, full.slots + 1):
        config = dataclasses.replace(full, slots=slots)
        found.append(run_on_card(made, config, pdl=True))
    check(found[0], made)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("tile", [(64, 64, 1), (64, 64, 4), (32, 64, 1), (32, 64, 2)], ids=str)
def test_statistics_change_nothing(tile, cuda):
    made = make_product(196, 256, 512, residual=True, device=cuda)
    config = ClusterLinearConfig(*tile, 2)
    assert torch.equal(run_on_card(made, config), check_every_way(made, config))


@pytest.mark.parametrize(
    "tile",
    [(64, 64, 1, 64), (64, 64, 4, 64), (128, 64, 2, 64), (128, 128, 1, 64), (32, 64, 1, 128),
     (32, 64, 2, 64)],
    ids=str,
)  # fmt: skip
def test_shares_change_nothing(tile, cuda):
    """The same bits whoever asks for a tile; of rows of one tile, of some and of many."""
    for M in (49, 196, 784):
        made = make_product(M, 512, 768, parts=6, gelu=True, device=cuda)
        alone = run_on_card(made, with_ring(768, *tile))
        check(alone, made)
        for shares in ((2, 1), (1, 2), (1, 4), (2, 2), (4, 1)):
            if tile[2] * shares[0] * shares[1] <= 8:
                found = run_on_card(made, with_ring(768, *tile, *shares))
                assert torch.equal(found, alone)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize(
    "tile",
    [(64, 64, 1, 64), (64, 128, 2, 64), (128, 128, 4, 64), (64, 64, 8, 64), (32, 64, 1, 256),
     (16, 128, 2, 64), (32, 64, 4, 128), (64, 128, 1, 64, 2, 3), (64, 128, 2, 64, 2, 1)],
    ids=str,
)  # fmt: skip
def test_more_programs_than_a_card_holds(tile, dtype, cuda):
    """25,088 rows: 128 images of 196."""
    N, K = 384, 1536
    made = make_product(25_088, N, K, residual=True, dtype=dtype, device=cuda)
    check_every_way(made, with_ring(K, *tile))


@pytest.mark.parametrize("offset", [10.0, 50.0])
def test_large_offsets_do_not_cancel(offset, cuda):
    """Means of rows up to 20 and 100 times their deviations, in front of a norm behind."""
    made = make_product(196, 1536, 384, parts=6, device=cuda, offset=offset)
    check(run_on_card(made, default_cluster_linear_config(196, 1536, 384)), made)


def test_no_rows_give_no_rows(cuda):
    made = make_product(64, 128, 256, device=cuda)
    made["x"] = made["x"][:0]
    assert run_on_card(made, ClusterLinearConfig(64, 64, 2, 2)).shape == (0, 128)


def test_what_the_copy_engine_refuses_goes_elsewhere(cuda):
    made = make_product(64, 128, 256, device=cuda)
    flat = torch.cat((made["x"].new_zeros(1), made["x"].flatten()))
    made["x"] = flat[1:].view(64, 256)
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        run_on_card(made, ClusterLinearConfig(64, 64, 2, 2))
    assert ops.linear(**made).isfinite().all()


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
def test_statistics_of_one_product_stand_behind_the_next(dtype, cuda):
    """proj onto a stream whose rows lie far from zero, then fc1."""
    made = make_product(196, 384, 384, residual=True, dtype=dtype, device=cuda)
    made["residual"] = made["residual"] + 30
    config = default_cluster_linear_config(196, 384, 384)
    stats = room_for_stats(196, 384, config, cuda)
    x = run_on_card(made, config, stats_out=stats)
    check_stats(stats, x)
    wide = make_product(196, 1536, 384, gelu=True, dtype=dtype, device=cuda, seed=1)
    wide |= {"x": x, "layer_norm_eps": EPS, "norm_stats": stats}
    wide["weight_sums"] = wide["weight"].double().sum(1).float()
    check(run_on_card(wide, default_cluster_linear_config(196, 1536, 384)), wide)


POST_NORM = [(row[0], *shape) for shape, ranges in MEASURED_POST_NORM.items() for row in ranges]


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("shape", POST_NORM, ids=str)
def test_post_norm(shape, dtype, cuda):
    """The last number of rows, and rows of images; twice into NaN, once in place."""
    rows, N, K = shape
    for M in {M for M in (49, 64, 196, 576, rows) if M <= rows}:
        assert default_post_norm_config(M, N, K) is not None
        made = make_post_norm(M, N, K, device=cuda, dtype=dtype)
        runs = [torch.full_like(made["residual"], float("nan")) for _ in range(2)]
        runs.append(made["residual"].clone())
        for out in runs[:2]:
            assert run_post_norm(made, out) is out
        run_post_norm(made | {"residual": runs[2]}, runs[2])
        check_post_norm(runs[0], made)
        assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize(("N", "K"), [(192, 768), (384, 384), (512, 2048)])
def test_a_post_norms_shares_change_nothing(N, K, cuda):
    """x copied once for all tiles of a row, or by each."""
    made = make_post_norm(196, N, K, device=cuda)
    config = default_post_norm_config(196, N, K)
    runs = [
        run_post_norm(
            made, torch.full_like(made["residual"], float("nan")),
            config=dataclasses.replace(config, share_columns=columns),
        )
        for columns in (1, N // config.block_n)
    ]  # fmt: skip
    check_post_norm(runs[0], made)
    assert torch.equal(*runs)


def test_post_norm_of_more_rows_than_a_card_holds(cuda):
    made = make_post_norm(25_088, 384, 384, device=cuda)
    config = default_post_norm_config(64, 384, 384)
    runs = [
        run_post_norm(made, torch.full_like(made["residual"], float("nan")), config=config)
        for _ in range(3)
    ]
    check_post_norm(runs[0], made)
    assert all(torch.equal(runs[0], other) for other in runs[1:])

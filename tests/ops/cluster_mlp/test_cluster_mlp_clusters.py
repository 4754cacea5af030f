"""The kernel's own source, a cluster's programs as threads: results, and that mistakes show."""

from __future__ import annotations

import threading
import time

import gluon_clusters
import gluon_memory
import gluon_threads
import pytest
import torch
from cluster_mlp_threads import (
    cluster_arrive_relaxed,
    expect_bytes_of_each,
    make_barriers,
    send_rows,
    take_rows,
)
from gluon_clusters import cluster_wait, expect_bytes_late, me, wait_bytes
from mlp_cases import check, make_mlp

from fastswin.ops.cluster_mlp.config import ClusterMlpConfig
from fastswin.ops.linear.stats import write_stats_ref

torch.set_num_threads(1)

#: Rows of a cluster, programs, channels: hidden units of a program are 128, 192 and 256, rows that
#: it adds up 4 to 32.
FORMS = [
    (128, 8, 384), (128, 8, 512), (128, 8, 256), (128, 4, 256), (64, 8, 384), (64, 8, 512),
    (64, 4, 256), (64, 16, 768), (128, 16, 512),
]  # fmt: skip

DTYPES = [torch.float16, torch.bfloat16]

#: Each form with one of them.
TYPED = [(form, DTYPES[i % 2]) for i, form in enumerate(FORMS)]


def made_for(form, rows=0, **more):
    """An MLP of one tile and a part of the next, unless rows are given."""
    return make_mlp(rows or form[0] + 21, form[2], **more)


@pytest.mark.parametrize(
    ("form", "dtype", "post_norm"),
    [(*typed, False) for typed in TYPED] + [(*typed, True) for typed in TYPED[:6]], ids=str,
)  # fmt: skip
def test_mlp(form, dtype, post_norm, run):
    """Rows of the last tile that no row of x fills."""
    made = made_for(form, dtype=dtype, post_norm=post_norm)
    check(run(made, ClusterMlpConfig(*form[:2])), made)


@pytest.mark.parametrize(("form", "dtype"), TYPED[:2] + TYPED[-1:], ids=str)
def test_in_place_with_statistics_left(form, dtype, run):
    made = made_for(form, dtype=dtype, offset=30.0)
    M, C = made["x"].shape
    left = torch.full((2, C // 128, M), float("nan"))
    found = run(made, ClusterMlpConfig(*form[:2]), in_place=True, stats_out=left)
    check(found, made)
    wanted = torch.empty_like(left, dtype=torch.float64)
    write_stats_ref(found, wanted)
    torch.testing.assert_close(left.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_statistics_of_its_own_far_from_zero(offset, run):
    made = make_mlp(70, 384, offset=offset)
    check(run(made, ClusterMlpConfig(64, 8)), made)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [(64, 8, 384), (128, 8, 256)], ids=str)
def test_an_offset_that_was_left_to_the_reader(form, dtype, run):
    made = made_for(form, dtype=dtype)
    made["offset"] = torch.randn(form[2], generator=torch.Generator().manual_seed(7))
    check(run(made, ClusterMlpConfig(*form[:2]), in_place=True), made)


@pytest.mark.parametrize("M", [1, 127, 128])
def test_few_rows(M, run):
    made = make_mlp(M, 256)
    check(run(made, ClusterMlpConfig(128, 8)), made)


def test_the_order_in_which_sums_land_does_not_matter(run):
    made = make_mlp(64, 384)
    runs = [run(made, ClusterMlpConfig(64, 8)) for _ in range(4)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.fixture
def impatient(monkeypatch):
    """What hangs is found out soon."""
    for module in (gluon_clusters, gluon_memory, gluon_threads):
        monkeypatch.setattr(module, "PATIENCE", 1.0)


def rejected(made, config, run, **stand_ins):
    with pytest.raises(AssertionError) as found:
        check(run(made, config, **stand_ins), made)
    return str(found.value)


def late(slow, skipped):
    """Stand-ins: program 0 reads a step late, and nobody waits for a phase of the cluster."""

    def take(*arguments):
        if me().rank == 0 and arguments[2] == slow:
            time.sleep(0.3)
        return take_rows(*arguments)

    def wait():
        if me().cluster.phases[threading.get_ident()] == skipped:
            me().cluster.pass_by()
        else:
            cluster_wait()

    return {"take_rows": take, "cluster_wait": wait}


@pytest.mark.parametrize(("slow", "skipped"), [(0, 1), (3, 2)])
def test_what_is_sent_over_rows_that_are_still_read_is_noticed(slow, skipped, run):
    """A fast program's statistics, or sums, take the place of a slow one's x."""
    rejected(make_mlp(64, 256), ClusterMlpConfig(64, 8), run, **late(slow, skipped))


def test_statistics_before_their_barriers_are_made_are_noticed(run, impatient):
    found = rejected(
        make_mlp(64, 256), ClusterMlpConfig(64, 8), run, expect_bytes=expect_bytes_late,
        cluster_wait=late(None, 1)["cluster_wait"],
    )  # fmt: skip
    assert "before its barrier is made" in found


def test_a_phase_in_which_the_asking_warps_do_not_arrive_is_noticed(run, impatient):
    readers = set()

    def take(*arguments):
        readers.add(threading.get_ident())
        return take_rows(*arguments)

    def arrive():
        if threading.get_ident() in readers or not me().cluster.phases.get(threading.get_ident()):
            cluster_arrive_relaxed()

    found = rejected(
        make_mlp(64, 256), ClusterMlpConfig(64, 8), run, take_rows=take,
        cluster_arrive_relaxed=arrive,
    )  # fmt: skip
    assert "barrier hangs" in found


def test_a_tile_that_is_asked_for_before_its_slot_is_empty_is_noticed(run):
    rejected(make_mlp(64, 384), ClusterMlpConfig(64, 8), run, wait_arrivals=lambda *arguments: None)


@pytest.mark.parametrize("warps", [3, 5])
def test_a_slot_that_counts_other_warps_is_noticed(warps, run, impatient):
    rejected(
        make_mlp(64, 384), ClusterMlpConfig(64, 8), run,
        make_barriers=lambda barriers, count, number: make_barriers(barriers, warps, number),
    )  # fmt: skip


def test_rows_that_nobody_waits_for_are_noticed(run):
    def take(address, dtype, STEP, OUTSTANDING, BLOCK_M):
        return take_rows(address, dtype, STEP, -1 if STEP == 2 else OUTSTANDING, BLOCK_M)

    rejected(make_mlp(64, 256), ClusterMlpConfig(64, 8), run, take_rows=take)


def test_sums_that_nobody_waits_for_are_noticed(run, impatient):
    def wait(barrier):
        if me().rank != 3:
            wait_bytes(barrier)

    def send(*arguments):
        if me().rank != 3:
            time.sleep(0.2)
        send_rows(*arguments)

    rejected(make_mlp(64, 256), ClusterMlpConfig(64, 8), run, wait_bytes=wait, send_rows=send)


@pytest.mark.parametrize("wrong", [-16, 16])
def test_a_barrier_that_counts_wrongly_is_noticed(wrong, run, impatient):
    rejected(
        make_mlp(64, 256), ClusterMlpConfig(64, 8), run,
        expect_bytes_of_each=lambda barriers, size, number: expect_bytes_of_each(
            barriers, size + wrong, number
        ),
    )  # fmt: skip

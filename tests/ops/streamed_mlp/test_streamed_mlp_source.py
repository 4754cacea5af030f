"""The kernel's own source with groups and programs as threads: results, and that mistakes show."""

from __future__ import annotations

import time

import gluon_clusters
import gluon_memory
import gluon_threads
import pytest
import torch
from gluon_clusters import me
from mlp_cases import check, make_mlp
from streamed_mlp_threads import receive_part, send_part, wait_bytes

from fastswin.ops.streamed_mlp.config import StreamedMlpConfig

torch.set_num_threads(1)

#: Channels, groups, programs that share hidden units.
FORMS = [(192, 3, 1), (192, 2, 2), (192, 2, 1), (128, 3, 1), (128, 2, 2), (256, 2, 1)]

DTYPES = [torch.float16, torch.bfloat16]


def made_for(form, **more):
    """An MLP of one tile and a part of the next."""
    return make_mlp(64 * form[1] + 21, form[0], **more)


@pytest.mark.parametrize("variant", ["v1", "v2", "v1 offset", "v2 offset"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mlp(form, variant, run):
    """Rows of the last tile that no row of x fills; rows that lie far from 0."""
    dtype = DTYPES[(FORMS.index(form) + len(variant)) % 2]
    made = made_for(form, dtype=dtype, post_norm=variant.startswith("v2"), offset=10.0)
    if variant.endswith("offset"):
        made["offset"] = torch.randn(form[0], generator=torch.Generator().manual_seed(7))
    check(run(made, StreamedMlpConfig(*form[1:]), in_place=variant != "v1"), made)


@pytest.mark.parametrize("M", [1, 64, 65, 128])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1]], ids=str)
def test_few_rows(form, M, run):
    made = make_mlp(M, form[0])
    check(run(made, StreamedMlpConfig(*form[1:])), made)


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_the_order_of_groups_and_sums_does_not_matter(form, run):
    made = made_for(form)
    runs = [run(made, StreamedMlpConfig(*form[1:])) for _ in range(3)]
    assert all(torch.equal(runs[0], other) for other in runs[1:])


@pytest.fixture
def impatient(monkeypatch):
    """What hangs is found out soon."""
    for module in (gluon_clusters, gluon_memory, gluon_threads):
        monkeypatch.setattr(module, "PATIENCE", 1.0)


def rejected(form, run, **stand_ins):
    made = made_for(form)
    with pytest.raises(AssertionError) as found:
        check(run(made, StreamedMlpConfig(*form[1:]), **stand_ins), made)
    return str(found.value)


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
def test_a_chunk_that_is_asked_for_before_its_slot_is_empty_is_noticed(form, run, impatient):
    """No group says that it has multiplied a chunk: the asking warp waits for ever."""
    assert "hangs" in rejected(form, run, _release=lambda *arguments: None)


def test_a_group_that_releases_too_early_is_noticed(run, impatient):
    def release(used, chunk, SLOTS):
        used.index(int(chunk) % SLOTS).arrive(2)

    rejected(FORMS[0], run, _release=release)


def test_sums_that_nobody_waits_for_are_noticed(run, impatient):
    def wait(barrier):
        if me().rank != 1:
            wait_bytes(barrier)

    def send(*arguments):
        time.sleep(0.2)
        send_part(*arguments)

    rejected(FORMS[1], run, wait_bytes=wait, send_part=send)


def test_sums_of_the_wrong_columns_are_noticed(run):
    def receive(address, dtype):
        return receive_part(int(address) ^ 8192, dtype)

    rejected((128, 2, 2), run, receive_part=receive)


def test_sums_for_the_sender_itself_are_noticed(run, impatient):
    def send(sums, address, barrier, rank):
        send_part(sums, address, barrier, 1 - rank)

    rejected(FORMS[1], run, send_part=send)

"""The ladder's choices without a GPU: rungs, pieces, bound, clearing; capture is played."""

from __future__ import annotations

import pytest
import torch

from fastswin.engine import graphs
from fastswin.engine.graphs import GraphLadder


class Event:
    """A CUDA event that only counts."""

    recorded = 0

    def record(self, stream):
        Event.recorded += 1


class Stream:
    """A CUDA stream on which nothing waits."""

    def wait_event(self, event):
        assert isinstance(event, Event)


class Replay:
    """A graph that computes from its static input into its static output, as a capture would."""

    def __init__(self, static, outputs):
        self.static, self.outputs, self.replays = static, outputs, 0

    def replay(self):
        self.replays += 1
        for out, new in zip(self.outputs, compute(self.static), strict=True):
            out.copy_(new)


def compute(images):
    return [images.sum((1, 2, 3)), images.mean((2, 3))]


class PlayedLadder(GraphLadder):
    """Records what is captured; never calls CUDA."""

    def __init__(self, batch_sizes=(1, 4, 8), max_graphs=16):
        self.captures: list[tuple[str, int]] = []
        super().__init__(
            lambda kind, images: (compute(images), kind), device=torch.device("cpu"),
            dtype=torch.float32, batch_sizes=batch_sizes, max_graphs=max_graphs,
        )  # fmt: skip

    def _capture(self, kind, rung, images):
        self.captures.append((kind, rung))
        static = torch.zeros(rung, *images.shape[1:])
        outputs, keep = self.run(kind, static)
        return graphs._Captured(Replay(static, outputs), static, outputs, keep)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    synchronized = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: synchronized.append(device))
    return synchronized


def images(batch, size=(4, 6), seed=0):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed + batch))


def assert_right(ladder, x, kind="logits"):
    outputs = ladder(kind, x)
    assert [o.shape for o in outputs] == [(len(x),), (len(x), 3)]
    for actual, expected in zip(outputs, compute(x), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("batch", "rungs"),
    [
        (1, [1]), (2, [4]), (3, [4]), (4, [4]), (5, [8]), (8, [8]), (9, [8, 1]), (16, [8]),
        (19, [8, 4]), (23, [8]),
    ],
)  # fmt: skip
def test_rungs(batch, rungs):
    ladder = PlayedLadder()
    assert_right(ladder, images(batch))
    assert ladder.captures == [("logits", rung) for rung in rungs]


def test_graphs_that_copy_are_told_with_the_reason():
    ladder = PlayedLadder()
    assert ladder.copies() == ()
    assert_right(ladder, images(1))
    assert_right(ladder, images(3))
    ladder._graphs["logits", 1, (3, 4, 6)].why_copies = ""
    assert ladder.copies() == ((("logits", 4, (3, 4, 6)), "graphs are not redirected"),)


def test_unsorted_and_repeated_ladder():
    ladder = PlayedLadder(batch_sizes=(8, 2, 8, 1))
    assert ladder.batch_sizes == (1, 2, 8)
    assert_right(ladder, images(2))
    assert ladder.captures == [("logits", 2)]


def test_one_capture_per_kind_rung_and_size():
    ladder = PlayedLadder()
    for _ in range(2):
        for kind in ("logits", "features"):
            for x in (images(3), images(4), images(4, (6, 4)), images(8)):
                assert_right(ladder, x, kind)
    wanted = [(3, 4, 6), (3, 6, 4)]
    keys = {(kind, 4, size) for kind in ("logits", "features") for size in wanted}
    keys |= {(kind, 8, (3, 4, 6)) for kind in ("logits", "features")}
    assert set(ladder.keys()) == keys
    assert len(ladder.captures) == len(keys)


def test_rows_of_earlier_images_are_dropped():
    ladder = PlayedLadder()
    assert_right(ladder, images(8))
    assert_right(ladder, images(5, seed=9))
    assert_right(ladder, images(8, seed=3))
    assert len(ladder.captures) == 1


def test_results_are_copies():
    ladder = PlayedLadder()
    first = ladder("logits", images(4))
    kept = [o.clone() for o in first]
    ladder("logits", images(4, seed=5))
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_least_recently_used_goes_first(no_cuda):
    ladder = PlayedLadder(max_graphs=2)
    a, b, c = images(1), images(1, (2, 2)), images(1, (8, 2))
    for x in (a, b, a, c):
        assert_right(ladder, x)
    assert ladder.keys() == [("logits", 1, (3, 4, 6)), ("logits", 1, (3, 8, 2))]
    assert len(no_cuda) == 1  # a dropped graph may still be running
    assert_right(ladder, b)
    assert len(ladder.captures) == 4
    assert len(ladder.keys()) == 2


@pytest.mark.parametrize("most", [1, 3])
def test_graphs_are_bounded(most):
    ladder = PlayedLadder(max_graphs=most)
    for side in range(1, 21):
        assert_right(ladder, images(2, (side, 3)))
        assert len(ladder.keys()) == min(side, most)
    assert len(ladder.captures) == 20


def test_clear(no_cuda):
    ladder = PlayedLadder()
    ladder.clear()
    assert no_cuda == []  # nothing runs, nothing to wait for
    assert_right(ladder, images(2))
    ladder.clear()
    assert no_cuda == [torch.device("cpu")]
    assert ladder.keys() == []
    assert_right(ladder, images(2))
    assert len(ladder.captures) == 2


def test_every_replay_is_chained_by_an_event():
    ladder = PlayedLadder()
    before = Event.recorded
    ladder("logits", images(19))
    assert Event.recorded - before == 3


@pytest.mark.parametrize("layout", ["channels-last", "crop", "expanded"])
def test_any_strides(layout):
    x = images(4, (6, 6))
    made = {
        "channels-last": x.contiguous(memory_format=torch.channels_last),
        "crop": torch.cat((x, x), 3)[..., 2:8],
        "expanded": x[:1].expand(4, -1, -1, -1),
    }[layout]
    assert_right(PlayedLadder(), made)

"""What a trial of a redirected graph notices, without a GPU, and what is redirected then."""

from __future__ import annotations

import pytest
import torch
from played_graph import Node, at, expected, pointer, some_images

from fastswin.engine import graph_trial
from fastswin.engine.graph_driver import MEMSET


@pytest.mark.parametrize("what", ["memset", "views", "shared", "transposed", "room", "outside"])
def test_results_are_copied_and_images_are_not(played, monkeypatch, what):
    def change(made):
        model = made.model
        if what == "memset":
            model.nodes.insert(1, Node(node_type=MEMSET, words=[model.logits.data_ptr()]))
        elif what == "views":
            made.outputs = [model.logits[:1]]
        elif what == "shared":
            made.outputs = [model.logits, model.logits]
        elif what == "transposed":
            made.outputs = [model.logits.t()]

    made = played(change=change)
    if what == "room":
        monkeypatch.setattr(graph_trial, "MAX_ROOM", 100)
    elif what == "outside":
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [])
    captured = made.captured()
    assert captured.why_copies.startswith("results are copied: ")
    assert "images" not in captured.why_copies
    assert captured.addresses.places == 1
    images = some_images()
    got = captured.replay(images)
    wanted = expected(images).t() if what == "transposed" else expected(images)
    for out in got:
        assert torch.equal(out, wanted[: len(out)])
        assert out.data_ptr() != made.model.logits.data_ptr()
    assert not made.model.images.any()


def hide_images(made):
    """The kernel reads the images where the capture did, whatever its argument says."""
    model = made.model
    hidden = pointer(model.images)
    run = model.nodes[0].run
    model.nodes[0].run = lambda images, *rest: run(hidden, *rest)


def hide_results(made):
    model = made.model
    hidden = bytes(8) + pointer(model.logits)
    run = model.nodes[1].run
    model.nodes[1].run = lambda sums, rest: run(sums, hidden)


def write_images(made):
    model = made.model
    run = model.nodes[0].run

    def changed(images, *rest):
        run(images, *rest)
        at(images, 1).add_(1)

    model.nodes[0].run = changed


def share_with_longer(made):
    """Before the results, 4 floats more were kept where they are."""
    model = made.model
    node = Node(pointer(model.logits), run=lambda p: at(p, model.logits.numel() + 4).fill_(2))
    model.nodes.insert(0, node)


def update_in_place(made):
    """The results are written by one kernel and doubled by the next."""
    model = made.model
    model.nodes[1:] = [
        model.nodes[1],
        Node(pointer(model.logits), run=lambda p: at(p, *model.logits.shape).mul_(2)),
    ]


def share_and_update(made):
    share_with_longer(made)
    update_in_place(made)


def overflow(made):
    model = made.model
    run = model.nodes[0].run
    model.nodes[0].run = lambda images, sums, n: (
        run(images, sums, n), at(sums, 1).fill_(float("inf"))
    )  # fmt: skip


def take_no_images(made):
    made.model.nodes[0] = Node(bytes(8))


@pytest.mark.parametrize(
    ("change", "reason", "images_too"),
    [
        (hide_images, "results differ", True),
        (hide_results, "results differ", False),
        (write_images, "writes to its images", True),
        (share_and_update, "a longer tensor's", False),
        (overflow, "not finite", True),
        (take_no_images, "no kernel takes", True),
    ],
)
def test_a_trial_decides(played, change, reason, images_too):
    made = played(change=change)
    addresses, why = made.redirect()
    assert reason in why
    assert (addresses is None) == images_too
    assert made.graph.running == [node.arguments for node in made.model.nodes]


@pytest.mark.parametrize(
    ("change", "places", "factor"), [(share_with_longer, 2, 1), (update_in_place, 3, 2)]
)
def test_the_last_kernel_or_all_of_them(played, change, places, factor):
    made = played(change=change)
    captured = made.captured()
    assert captured.why_copies == ""
    assert captured.addresses.places == places
    images = some_images()
    assert torch.equal(captured.replay(images)[0], factor * expected(images))


def test_another_instance_after_a_refusal(played):
    made = played(change=hide_results)
    made.redirect()
    assert made.graph.instances == 3

"""Redirected graphs without a GPU: what is found, what is refused, what a call does."""

from __future__ import annotations

import ctypes

import pytest
import torch
from played_graph import (
    Node,
    PlayedDriver,
    PlayedGraph,
    PlayedModel,
    at,
    expected,
    pointer,
    some_images,
)

from fastswin.engine import graph_driver, graph_trial
from fastswin.engine.graph_addresses import GraphAddresses, RedirectError
from fastswin.engine.graph_driver import MEMCPY, MEMSET, Driver, DriverError, KernelParams
from fastswin.engine.graphs import _Captured


def test_structures_are_as_in_cuda_h():
    assert ctypes.sizeof(KernelParams) == 72
    assert KernelParams.values.offset == 40
    assert KernelParams.kernel.offset == 56
    assert graph_driver._FILL_WORDS == {MEMCPY: 200 // 8, MEMSET: 40 // 8}


def test_places_are_found(played):
    made = played()
    addresses, why = made.redirect()
    assert why == ""
    assert addresses.places == 2
    assert addresses.moves_results
    assert made.graph.replays == 2  # one as captured, one redirected
    assert made.graph.running == [node.arguments for node in made.model.nodes]
    assert not made.model.images.any()


def test_one_kernel_with_several_places_is_set_once(played):
    def change(made):
        model = made.model
        both = pointer(model.images) + bytes(8) + pointer(model.logits)

        def run(arguments):
            images = at(arguments, model.batch, 3, 4, 4)
            at(arguments, model.batch, 5, word=2).copy_(expected(images))

        model.nodes = [Node(both, run=run), Node()]

    made = played(change=change)
    captured = made.captured()
    assert captured.addresses.places == 2
    images = some_images()
    assert torch.equal(captured.replay(images)[0], expected(images))
    assert made.driver.changes == [1]


def test_packed_arguments_are_changed_in_their_buffer(played):
    """How libraries launch: all arguments in one buffer, with its size."""

    def change(made):
        model = made.model
        both = pointer(model.sums) + bytes(8) + pointer(model.logits)
        model.nodes[1] = Node(
            both, packed=True, run=lambda all_of_it: model._head(all_of_it[:8], all_of_it[8:])
        )
        model.nodes.insert(0, Node(bytes(24), packed=True))

    made = played(change=change)
    captured = made.captured()
    assert captured.why_copies == ""
    for seed in range(2):
        images = some_images(seed=seed)
        assert torch.equal(captured.replay(images)[0], expected(images))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [((1, 64, 0), "without a buffer or its size"), ((7, 64, 0), "key 7")],
)
def test_lists_that_nobody_knows_are_refused(entries, reason):
    extra = (ctypes.c_void_p * len(entries))(*entries)
    with pytest.raises(DriverError, match=reason):
        PlayedDriver(None).arguments(KernelParams(extra=ctypes.addressof(extra)))


def test_calls_read_and_write_the_callers_memory(played):
    captured = (made := played()).captured()
    made.model.images.fill_(float("nan"))
    kept = []
    for seed in range(3):
        images = some_images(seed=seed)
        kept.append((images, images.clone(), captured.replay(images)[0]))
    for images, before, logits in kept:
        assert torch.equal(logits, expected(before))
        assert torch.equal(images, before)
    assert made.model.images.isnan().all()


def test_an_equal_address_makes_no_call(played):
    captured = (made := played()).captured()
    images = some_images()
    first = captured.replay(images)
    made.driver.changes.clear()
    addresses = captured.addresses
    addresses.set(images, first)
    assert made.driver.changes == []
    addresses.set(images, captured.outputs)
    assert made.driver.changes == [2]


def test_fewer_images_than_the_rung_are_copied(played):
    made = played(batch=4)
    captured = made.captured()
    captured.replay(some_images(4))
    images = some_images(3, seed=1)
    logits = captured.replay(images)[0]
    assert torch.equal(logits, expected(images))
    assert torch.equal(made.model.images[:3], images)
    assert logits.untyped_storage().nbytes() == logits.nbytes
    assert made.graph.running == [node.arguments for node in made.model.nodes]


@pytest.mark.parametrize("kind", ["strides", "misaligned", "dtype", "negative"])
def test_images_that_kernels_cannot_read_are_copied(played, kind):
    images = some_images()
    odd = {
        "strides": images.contiguous(memory_format=torch.channels_last),
        "misaligned": torch.cat((torch.zeros(1), images.flatten()))[1:].view_as(images),
        "dtype": images.double(),
        "negative": torch._neg_view(-images),
    }[kind]
    made = played()
    captured = made.captured()
    captured.replay(some_images(seed=3))
    logits = captured.replay(odd)[0]
    assert torch.equal(made.model.images, images)
    assert torch.equal(logits, expected(images))
    assert logits.data_ptr() != made.model.logits.data_ptr()
    assert torch.equal(captured.replay(images)[0], expected(images))


def add(node):
    return lambda made: made.model.nodes.append(node(made.model))


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (lambda m: Node(pointer(m.images, 16)), "inside the images"),
        (lambda m: Node(bytes(8) + pointer(m.images, m.images.nbytes - 1)), "inside the images"),
        (lambda m: Node(node_type=MEMCPY, words=[0, m.images.data_ptr() + 4]), "a copy or a fill"),
        (lambda m: Node(node_type=MEMSET, words=[m.images.data_ptr()]), "a copy or a fill"),
        (lambda m: Node(node_type=4), "type 4"),
    ],
)
def test_graphs_that_keep_their_addresses(played, node, reason):
    made = played(change=add(node))
    addresses, why = made.redirect()
    assert addresses is None
    assert reason in why
    assert made.driver.changes == []


@pytest.mark.parametrize(
    "node",
    [
        lambda m: Node(pointer(m.images, m.images.nbytes)),  # what lies behind them
        lambda m: Node(bytes(1) + pointer(m.images)),  # no whole word
        lambda m: Node(pointer(m.logits, 4)),  # an earlier tensor in the results' memory
        lambda m: Node(node_type=MEMSET, words=[m.sums.data_ptr()]),
        lambda m: Node(node_type=5),
    ],
)
def test_other_nodes_do_not_matter(played, node):
    addresses, why = played(change=add(node)).redirect()
    assert addresses.places == 2
    assert why == ""


def test_copies_without_a_driver(played, monkeypatch):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(graph_trial, "load_driver", missing)
    made = played()
    made.driver = None
    images = some_images()
    captured = _Captured(made.graph, made.model.images, made.outputs, None)
    captured.addresses, captured.why_copies = made.redirect()
    assert captured.addresses is None
    assert "libcuda" in captured.why_copies
    assert torch.equal(captured.replay(images)[0], expected(images))


def test_an_old_driver_is_refused():
    class Old:
        def __getattr__(self, name):
            raise AttributeError(name)

    with pytest.raises(AttributeError):
        Driver(Old())


def test_a_driver_that_refuses_at_capture(played):
    made = played()
    made.driver.fails = 1
    addresses, why = made.redirect()
    assert addresses is None
    assert "CUDA error 1" in why
    assert made.graph.running == [node.arguments for node in made.model.nodes]


def test_a_driver_that_refuses_at_a_call(played):
    captured = (made := played()).captured()
    made.driver.fails = 1
    images = some_images()
    assert torch.equal(captured.replay(images)[0], expected(images))
    assert captured.addresses is None
    assert "CUDA error 1" in captured.why_copies
    other = some_images(seed=4)
    assert torch.equal(captured.replay(other)[0], expected(other))


def test_addresses_of_a_graph_that_lacks_them():
    model = PlayedModel(1)
    graph = PlayedGraph(model.nodes)
    with pytest.raises(RedirectError, match="no kernel takes"):
        GraphAddresses(graph, [model.images, torch.zeros(3)], PlayedDriver(graph))
    assert issubclass(DriverError, RuntimeError)

"""The answer depends on weights and images only: not on earlier calls, threads or sizes."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from engine_cases import cpu_engine, images_like, tiny

from fastswin.engine import plans as plans_module

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])


@VERSIONS
def test_sizes_and_batches_in_turn(version):
    model = tiny(version)
    engine = cpu_engine(model)
    cases = [(2, (34, 50)), (1, (64, 96)), (3, (34, 50)), (2, (41, 75))]
    inputs = [images_like(model, batch, size) for batch, size in cases]
    first = [(engine(x), engine.features(x)) for x in inputs]
    for x, (logits, maps) in zip(reversed(inputs), reversed(first), strict=True):
        assert torch.equal(engine(x), logits)
        assert all(torch.equal(a, b) for a, b in zip(engine.features(x), maps, strict=True))
        fresh = cpu_engine(model)
        assert torch.equal(fresh(x), logits)


@VERSIONS
def test_images_of_a_batch_do_not_meet(version):
    model = tiny(version)
    engine = cpu_engine(model)
    images = images_like(model, 3)
    alone = torch.cat([engine(image[None]) for image in images])
    torch.testing.assert_close(engine(images), alone, atol=1e-5, rtol=0)
    images[1] = float("nan")
    poisoned = engine(images)
    assert bool(poisoned[1].isnan().all())
    torch.testing.assert_close(poisoned[[0, 2]], alone[[0, 2]], atol=1e-5, rtol=0)


def test_results_stay_valid():
    model = tiny(1)
    engine = cpu_engine(model)
    images = images_like(model)
    logits, maps = engine(images), engine.features(images)
    kept = logits.clone(), [m.clone() for m in maps]
    engine(images * 2)
    engine.features(images * 2)
    engine.refresh()
    engine(images * 3)
    assert torch.equal(logits, kept[0])
    assert all(torch.equal(a, b) for a, b in zip(maps, kept[1], strict=True))
    logits.zero_()
    for m in maps:
        m.zero_()
    assert torch.equal(engine(images), kept[0])
    assert all(torch.equal(a, b) for a, b in zip(engine.features(images), kept[1], strict=True))


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plans_module, "MAX_PLANS", 3)
    model = tiny(1, depths=(1,), num_heads=(2,))
    engine = cpu_engine(model)
    expected = [engine(images_like(model, batch)) for batch in range(1, 7)]
    assert len(engine._plans) == 3
    for batch, logits in enumerate(expected, 1):
        assert torch.equal(engine(images_like(model, batch)), logits)


def test_threads_get_the_answers_of_single_calls():
    model = tiny(1)
    engine = cpu_engine(model)
    inputs = [
        images_like(model, 1 + i % 2, size) for i, size in enumerate([(34, 50), (41, 75)] * 2)
    ]
    expected = [engine(x) for x in inputs]
    shared = cpu_engine(model)
    wrong: list[str] = []

    def work(index: int) -> None:
        for turn in range(5):
            if not torch.equal(shared(inputs[index]), expected[index]):
                wrong.append(f"thread {index}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_no_gradient_reaches_the_source():
    model = tiny(1)
    images = images_like(model).requires_grad_()
    logits = cpu_engine(model)(images)
    assert not logits.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_inference_mode():
    model = tiny(1)
    engine = cpu_engine(model)
    images = images_like(model)
    with torch.inference_mode():
        inside = engine(images)
    assert torch.equal(engine(images), inside)


def test_autocast_changes_nothing():
    model = tiny(1)
    engine = cpu_engine(model)
    images = images_like(model)
    with torch.autocast("cpu", torch.bfloat16):
        inside = engine(images)
    assert inside.dtype == torch.float32
    assert torch.equal(engine(images), inside)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__
)
def test_an_engine_is_not_copied(duplicate):
    with pytest.raises(
        TypeError, match=r"an Engine cannot be copied or pickled .* build another one"
    ):
        duplicate(cpu_engine(tiny(1)))

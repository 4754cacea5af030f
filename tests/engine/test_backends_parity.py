"""Every runtime gives the readable model's answers: settings, sizes, batches, and odd values."""

from __future__ import annotations

import threading

import pytest
import torch
from backend_cases import RUNTIMES, runtime_engine
from engine_cases import images_like, largest_difference, tiny

from fastswin.engine.backends import graph, runner
from fastswin.engine.backends.runner import part_images, parts
from fastswin.models import find_variant

#: Logits near 1; V2's maps reach 30, where fp32 rounds a hundred times coarser.
LOGITS, MAPS = 1e-5, 1e-4

#: Both maps (9x13, 5x7) are padded to 4x4 windows unless a setting says otherwise.
SETTINGS = {
    "v1": (1, {}),
    "v2": (2, {}),
    "v1-torchvision-window-over-map": (
        1, {"window_convention": "torchvision", "window_size": 8},
    ),
    "v2-rectangular-window": (2, {"window_size": (3, 5)}),
    "v1-whole-windows": (1, {"image_size": (32, 64)}),
    "v2-no-qkv-bias": (2, {"qkv_bias": False}),
    "v1-no-patch-norm-no-head-grey": (
        1, {"patch_norm": False, "num_classes": 0, "in_channels": 1},
    ),
    "v1-three-stages": (1, {"depths": (1, 2, 1), "num_heads": (2, 4, 8), "window_size": 3}),
    "v1-qk-scale-eps": (1, {"qk_scale": 0.7, "layer_norm_eps": 1e-2, "downsample_norm_eps": 0.03}),
    "v2-one-shifted-block": (2, {"depths": (2,), "num_heads": (2,)}),
}  # fmt: skip


def assert_right(engine, model, images):
    with torch.no_grad():
        stages, logits = model.forward_features(images), model(images)
    assert (logits[0] - logits[-1]).abs().max() > 1e-2
    assert largest_difference(engine(images), logits) <= LOGITS
    maps = engine.features(images, "NHWC")
    assert [m.shape for m in maps] == [s.shape for s in stages]
    for ours, expected in zip(maps, stages, strict=True):
        assert largest_difference(ours, expected) <= MAPS


@RUNTIMES
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings(setting, runtime):
    version, settings = setting
    model = tiny(version, **settings)
    assert_right(runtime_engine(model, runtime), model, images_like(model))


@RUNTIMES
def test_sizes_in_turn_with_a_position_embedding(runtime):
    model = tiny(1, absolute_position_embedding=True, depths=(2,), num_heads=(2,))
    engine = runtime_engine(model, runtime)
    sizes = [(34, 50), (41, 75), (34, 50)]
    first = [engine(images_like(model, size=size)) for size in sizes]
    for size, logits in zip(sizes, first, strict=True):
        images = images_like(model, size=size)
        with torch.no_grad():
            assert largest_difference(logits, model(images)) <= LOGITS
        assert torch.equal(engine(images), logits)


@RUNTIMES
@pytest.mark.parametrize("batch", [1, 5])
def test_any_batch_in_parts(batch, runtime, monkeypatch):
    monkeypatch.setattr(runner, "PART_TOKENS", 2 * 9 * 13)
    model = tiny(1, depths=(2,), num_heads=(2,))
    images = images_like(model, batch)
    engine = runtime_engine(model, runtime)
    with torch.no_grad():
        assert largest_difference(engine(images), model(images)) <= LOGITS
    compiled = {images for _, images, _ in engine.report().programs}
    assert compiled == {1} if batch == 1 else {1, 2}


@RUNTIMES
def test_empty_batch(runtime):
    engine = runtime_engine(tiny(2), runtime, "bf16")
    logits = engine(torch.zeros(0, 3, 41, 50))
    assert (logits.shape, logits.dtype) == ((0, 7), torch.bfloat16)
    assert [tuple(m.shape) for m in engine.features(torch.zeros(0, 3, 41, 50))] == [
        (0, 32, 11, 13), (0, 64, 6, 7),
    ]  # fmt: skip
    assert engine.report().programs == ()


def test_a_mask_too_large_to_add_up_beforehand(monkeypatch):
    monkeypatch.setattr(graph, "SUMMED_BIAS_ELEMENTS", 0)
    model = tiny(1, depths=(2,), num_heads=(2,))
    images = images_like(model)
    for runtime in ("openvino", "onnxruntime"):
        with torch.no_grad():
            assert largest_difference(runtime_engine(model, runtime)(images), model(images)) <= (
                LOGITS
            )


@RUNTIMES
def test_pixels_that_are_not_finite_or_overflow(runtime):
    """The images around them are untouched, and their own answers are PyTorch's."""
    model = tiny(1, depths=(2,), num_heads=(2,))
    engine, plain = runtime_engine(model, runtime), runtime_engine(model, "torch")
    images = images_like(model, 4)
    alone = engine(images)
    for image, value in enumerate((float("nan"), float("inf"), -1e30)):
        images[image, 0, 5, 7] = value
    logits, expected = engine(images), plain(images)
    assert bool(expected[:2].isnan().all())
    torch.testing.assert_close(logits[3], alone[3], atol=LOGITS, rtol=0)
    torch.testing.assert_close(logits, expected, atol=LOGITS, rtol=0, equal_nan=True)
    for ours, theirs in zip(engine.features(images), plain.features(images), strict=True):
        torch.testing.assert_close(ours, theirs, atol=MAPS, rtol=0, equal_nan=True)


@RUNTIMES
def test_weights_that_are_not_finite_run_on_pytorch_until_they_are(runtime):
    model = tiny(1, depths=(1,), num_heads=(2,))
    images = images_like(model)
    bias = model.head.bias
    before = bias[2].item()
    with torch.no_grad():
        bias[2] = float("nan")
    engine = runtime_engine(model, runtime)
    assert engine(images).isnan().nonzero()[:, 1].tolist() == [2, 2]
    assert engine.report().backend.backend == "torch"
    assert "NaN" in engine.report().backend.reason
    with torch.no_grad():
        bias[2] = before
    engine.refresh()
    assert engine.report().backend.backend == runtime
    with torch.no_grad():
        assert largest_difference(engine(images), model(images)) <= LOGITS


@RUNTIMES
def test_refresh_takes_new_weights_and_results_stay_valid(runtime):
    model = tiny(1, depths=(2,), num_heads=(2,))
    images = images_like(model)
    engine = runtime_engine(model, runtime)
    logits, maps = engine(images), engine.features(images)
    kept = logits.clone(), [m.clone() for m in maps]
    with torch.no_grad():
        model.layers[0].blocks[1].mlp.fc1.weight.mul_(1.5)
    assert torch.equal(engine(images), kept[0])  # a snapshot
    engine(images * 2)
    engine.features(images * 2)
    engine.refresh()
    with torch.no_grad():
        expected = model(images)
    assert largest_difference(engine(images), expected) <= LOGITS
    assert largest_difference(expected, kept[0]) > 1e-3
    assert torch.equal(logits, kept[0])
    assert all(torch.equal(a, b) for a, b in zip(maps, kept[1], strict=True))


@RUNTIMES
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_images_of_other_dtypes_and_strides(dtype, runtime):
    model = tiny(1, depths=(1,), num_heads=(2,))
    engine = runtime_engine(model, runtime)
    images = images_like(model).to(dtype)
    crop = torch.full((2, 3, 60, 90), float("nan"), dtype=dtype)[:, :, 9:43, 20:70]
    crop.copy_(images)
    channels_last = images.contiguous(memory_format=torch.channels_last)
    expected = engine(images.float())
    for made in (images, crop, channels_last):
        before = made.clone()
        assert torch.equal(engine(made), expected)
        assert torch.equal(made, before)


@RUNTIMES
def test_threads_get_the_answers_of_single_calls(runtime):
    model = tiny(1, depths=(1,), num_heads=(2,))
    sizes = [(34, 50), (41, 75), (34, 50)]
    inputs = [images_like(model, 1 + i % 2, size) * (i + 1) for i, size in enumerate(sizes)]
    engine = runtime_engine(model, runtime)
    expected = [engine(x) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        wrong.extend(
            index for _ in range(6) if not torch.equal(engine(inputs[index]), expected[index])
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@RUNTIMES
def test_programs_are_bounded(runtime, monkeypatch):
    monkeypatch.setattr(runner, "MAX_PROGRAMS", 2)
    model = tiny(1, depths=(1,), num_heads=(2,), window_convention="torchvision")
    engine = runtime_engine(model, runtime)
    sizes = [(16, 20), (20, 24), (24, 28), (28, 32)]
    expected = [engine(images_like(model, 1, size)) for size in sizes]
    assert [size for _, _, size in engine.report().programs] == sizes[-2:]
    for size, logits in zip(sizes, expected, strict=True):
        assert torch.equal(engine(images_like(model, 1, size)), logits)


@RUNTIMES
def test_a_map_smaller_than_the_window_names_the_stage(runtime):
    engine = runtime_engine(tiny(1, image_size=(64, 96)), runtime)
    with pytest.raises(ValueError, match=r"stage 1: the token map 3x6 is smaller than the window"):
        engine(torch.zeros(1, 3, 24, 48))


@RUNTIMES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_check_finite_and_dtypes(precision, runtime):
    model = tiny(1, depths=(1,), num_heads=(2,))
    engine = runtime_engine(model, runtime, precision)
    images = images_like(model)
    assert engine(images).dtype == engine.dtype
    assert {m.dtype for m in engine.features(images)} == {engine.dtype}
    with torch.no_grad():
        expected = model(images)
    assert largest_difference(engine(images), expected) <= (1e-2 if precision == "bf16" else LOGITS)
    largest = engine.check_finite(images)[-1].max_abs
    assert largest == pytest.approx(expected.abs().max().item(), rel=1e-5)


PARTS = [(1, 4, [1]), (13, 4, [4, 4, 4, 1]), (7, 8, [4, 2, 1]), (3, 1, [1, 1, 1])]


@pytest.mark.parametrize(("batch", "most", "sizes"), PARTS)
def test_parts_cover_the_batch_once(batch, most, sizes):
    found = parts(batch, most)
    assert [stop - start for start, stop in found] == sizes
    assert [i for start, stop in found for i in range(start, stop)] == list(range(batch))


def test_large_images_go_one_by_one():
    config = find_variant("swin_tiny_patch4_window7_224")
    assert part_images(config, (224, 224)) == 1
    assert part_images(config, (800, 1333)) == 1
    assert part_images(config, (112, 112)) == 4

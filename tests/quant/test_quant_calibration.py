"""Calibration and its files; SWO-23: every way in which ranges can be missing or wrong."""

import copy
import dataclasses
import json
import sys

import pytest
import torch
from quant_cases import images_like, tiny

from fastswin import quant
from fastswin.quant.observations import Observations
from fastswin.quant.ranges import fingerprint_of, inverse_of, scale_of
from fastswin.quant.storage import QUANT_KEY

FC2 = "layers.0.blocks.1.mlp.fc2"


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture(scope="module")
def calibration(model):
    return quant.calibrate(model, images_like(model, 4))


def document(calibration, **changes):
    return {**json.loads(json.dumps(calibration.to_dict())), **changes}


def test_every_linear_layer_of_blocks_and_mergings_has_a_range(model, calibration):
    linears = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "head"
    }
    assert set(calibration.layers) == linears
    assert calibration.images == 4
    qkv = calibration.layers["layers.0.blocks.0.attn.qkv"]
    assert len(qkv.output_amax) == 3  # q, k and v apart
    assert qkv.weight_amax.shape == (72,)
    assert calibration.layers["layers.0.blocks.0.mlp.fc1"].output_amax == ()
    assert qkv.input_scale == scale_of(qkv.input_amax, "int8")
    torch.testing.assert_close(qkv.weight_scale, qkv.weight_amax / 127, rtol=0, atol=0)


def test_ranges_are_those_of_the_folded_layer(model):
    """An outlier in a LayerNorm's affine moves into the weight and leaves the range alone."""
    changed = copy.deepcopy(model)
    block = changed.layers[0].blocks[0]
    with torch.no_grad():
        block.norm1.weight[5] *= 50
        block.norm1.bias[5] *= 50
        block.attn.qkv.weight[:, 5] /= 50
    images = images_like(model)
    for name in ("int8", "int8_mode1"):
        before, after = (quant.calibrate(m, images, name).layers for m in (model, changed))
        for layer in before:
            assert after[layer].input_amax == pytest.approx(before[layer].input_amax, rel=0.01)


def test_order_and_batch_size_do_not_matter(model):
    images = images_like(model, 6)
    whole = quant.observe(model, images)
    pieces = quant.observe(model, images.flip(0).split(2))
    assert whole.images == pieces.images == 6
    for name in ("int8", "int8_mode1", "fp8"):
        a, b = (quant.calibration_of(model, seen, name).layers for seen in (whole, pieces))
        for layer, r in a.items():  # another batch size may round an activation differently
            assert b[layer].input_amax == pytest.approx(r.input_amax, rel=1e-5)


def test_the_same_bytes_twice(model, tmp_path):
    contents = []
    for attempt in range(2):
        calibrations = [
            quant.calibrate(model, images_like(model, 4).split(2), name)
            for name in ("int8", "int8_mode2")
        ]
        paths = (tmp_path / f"{attempt}.safetensors", tmp_path / f"{attempt}.json")
        quant.save_quantized(model, calibrations, paths[0], {"b": 1, "a": [2]})
        quant.save_ranges(model, calibrations, paths[1])
        contents.append([path.read_bytes() for path in paths])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_files_give_back_what_was_saved(model, calibration, tmp_path, suffix):
    path = tmp_path / f"ranges.{suffix}"
    save = quant.save_quantized if suffix == "safetensors" else quant.save_ranges
    save(model, calibration, path)
    found = quant.load_ranges(path, model)["int8"]
    assert found.scheme == calibration.scheme
    for name, r in calibration.layers.items():
        assert found.layers[name].input_amax == r.input_amax
        assert found.layers[name].output_amax == r.output_amax
        assert torch.equal(found.layers[name].weight_amax, r.weight_amax)


def test_a_checkpoint_carries_weights_ranges_and_other_metadata(model, calibration, tmp_path):
    path = quant.save_quantized(model, calibration, tmp_path / "m.safetensors", {"classes": ["a"]})
    loaded = quant.load_quantized(path)
    assert fingerprint_of(loaded.model) == fingerprint_of(model)
    assert list(loaded.calibrations) == ["int8"]
    assert loaded.metadata == {"classes": ["a"]}
    images = images_like(model)
    torch.testing.assert_close(
        quant.QuantizedSwin(loaded.model, loaded.calibrations["int8"])(images),
        quant.QuantizedSwin(model, calibration)(images),
        rtol=0, atol=0,
    )  # fmt: skip


def test_a_float_checkpoint_is_refused(model, tmp_path):
    from fastswin.models import save_checkpoint

    path = save_checkpoint(model, tmp_path / "float.safetensors")
    with pytest.raises(quant.QuantizationError, match="holds no calibration"):
        quant.load_quantized(path)
    with pytest.raises(quant.QuantizationError, match="holds no calibration"):
        quant.load_ranges(path, model)


def test_missing_layers_are_named(model, calibration):
    values = document(calibration)
    del values["layers"][FC2]
    with pytest.raises(quant.QuantizationError, match=f"1 of 17 layers have no range: {FC2};"):
        quant.Calibration.from_dict(values, model)
    values["layers"] = {}
    with pytest.raises(quant.QuantizationError, match=r"17 of 17 .*attn\.qkv.*reduction"):
        quant.Calibration.from_dict(values, model)
    without = dataclasses.replace(
        calibration, layers={n: r for n, r in calibration.layers.items() if n != FC2}
    )
    with pytest.raises(quant.QuantizationError, match=FC2):
        quant.QuantizedSwin(model, without)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0], ids=str)
@pytest.mark.parametrize("field", ["input", "output"])
def test_a_range_that_is_not_legal_is_named(model, calibration, field, bad):
    values = document(calibration)
    entry = values["layers"][FC2]
    if field == "input":
        entry["input_amax"] = bad
    else:
        entry["output_amax"] = [bad]
    with pytest.raises(quant.QuantizationError, match=f"at least 0; not so in {FC2}$"):
        quant.Calibration.from_dict(values, model)


def test_other_weights_and_other_schemes_are_refused(model, calibration):
    trained = copy.deepcopy(model)
    with torch.no_grad():
        trained.layers[0].blocks[0].mlp.fc1.weight[0, 0] += 1e-3
    with pytest.raises(quant.QuantizationError, match="made for other weights"):
        quant.QuantizedSwin(trained, calibration)
    with pytest.raises(quant.QuantizationError, match="made for other weights"):
        quant.Calibration.from_dict(document(calibration), trained)
    mode1 = quant.calibrate(model, images_like(model), "int8_mode1")
    with pytest.raises(quant.QuantizationError, match=r"'int8_mode1' .*not for 'int8_mode2'"):
        mode1.check(model, "int8_mode2")
    mode1.check(model, "int8_mode1")
    edited = document(mode1)
    edited["scheme"] = document(calibration)["scheme"]
    with pytest.raises(quant.QuantizationError, match="was changed after calibration"):
        quant.Calibration.from_dict(edited, model)


@pytest.mark.parametrize("values", [{}, {"layers": 3}, {"scheme": {}}], ids=str)
def test_malformed_entries(model, values):
    with pytest.raises(quant.QuantizationError, match="malformed"):
        quant.Calibration.from_dict(values, model)


@pytest.mark.parametrize(
    "images", [[], torch.empty(0, 3, 34, 50)], ids=["no-batches", "empty-batch"]
)
def test_no_images(model, images):
    with pytest.raises(quant.QuantizationError, match="at least one image"):
        quant.calibrate(model, images)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_images_that_are_not_finite_name_the_first_layer(model, bad):
    images = images_like(model)
    images[1, 0, 3, 3] = bad
    with pytest.raises(quant.QuantizationError, match=r"^layers\.0\.blocks\.0\.attn\.qkv: saw"):
        quant.calibrate(model, images)


def test_constant_images_calibrate_and_run(model):
    images = torch.full((2, 3, 34, 50), 0.5)
    out = quant.QuantizedSwin(model, quant.calibrate(model, images))(images)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", quant.PRESETS)
def test_an_all_zero_tensor_has_scale_one_and_gives_exact_zeros(model, name):
    dead = copy.deepcopy(model)
    mlp = dead.layers[0].blocks[0].mlp
    with torch.no_grad():
        for parameter in (mlp.fc1.weight, mlp.fc1.bias, mlp.fc2.weight, mlp.fc2.bias):
            parameter.zero_()
        dead.layers[0].blocks[0].norm2.bias.zero_()
    calibration = quant.calibrate(dead, images_like(dead), name)
    fc2 = calibration.layers["layers.0.blocks.0.mlp.fc2"]
    assert (fc2.input_amax, fc2.input_scale, fc2.output_scale) == (0.0, 1.0, (1.0,))
    assert bool((fc2.weight_scale == 1).all())
    quantized = quant.QuantizedSwin(dead, calibration)
    zeros = quantized.linears[fc2.name](torch.zeros(3, 96))
    assert bool((zeros == 0).all())
    assert bool(quantized(images_like(dead)).isfinite().all())


def test_a_range_below_the_smallest_float_step_keeps_a_finite_inverse():
    scale = scale_of(1e-42, "int8")
    assert scale > 0
    assert inverse_of(scale) < float("inf")


def test_calibration_runs_in_eval_mode_and_puts_flags_back():
    """SWO-23: a block that drop path would skip, and dropout, must not show."""
    torch.manual_seed(0)
    plain, dropping = tiny(), tiny(drop_path_rate=0.9, drop_rate=0.5, attn_drop_rate=0.5)
    dropping.train()
    dropping.layers[0].eval()
    before = [module.training for module in dropping.modules()]
    images = images_like(plain)
    found, expected = quant.calibrate(dropping, images), quant.calibrate(plain, images)
    assert found.to_dict() == expected.to_dict()
    assert [module.training for module in dropping.modules()] == before
    assert all(p.grad is None and p.requires_grad for p in dropping.parameters())


def test_an_interrupted_run_goes_on(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["fastswin.quant.calibrate"], "STATE_EVERY", 2)
    batches = images_like(model, 5).split(1)
    state = tmp_path / "state.safetensors"

    def interrupted():
        yield from batches[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quant.calibrate(model, interrupted(), state=state)
    assert Observations.load(state).batches == 2
    counted = []
    resumed = quant.calibrate(model, batches, state=state, on_batch=counted.append)
    assert counted == [1, 1, 1]  # the last three: two were kept, the third was lost
    assert resumed.to_dict() == quant.calibrate(model, batches).to_dict()
    assert not state.exists()


def test_a_state_of_other_weights_or_another_file_is_refused(model, tmp_path):
    state = tmp_path / "state.safetensors"
    quant.observe(tiny(seed=1), images_like(model, 1)).save(state)
    with pytest.raises(ValueError, match="belongs to other weights"):
        quant.calibrate(model, images_like(model), state=state)
    state.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="holds no calibration state"):
        quant.calibrate(model, images_like(model), state=state)


def test_one_pass_serves_every_scheme_and_merging_adds(model):
    images = images_like(model, 4)
    half = quant.observe(model, images[:2])
    half.merge(quant.observe(model, images[2:]))
    assert (half.images, half.batches) == (4, 2)
    pair = quant.observe(model, images.split(2))
    for name in quant.PRESETS:
        found = quant.calibration_of(model, half, name).to_dict()
        assert found == quant.calibration_of(model, pair, name).to_dict()
    with pytest.raises(ValueError, match="other weights"):
        half.merge(quant.observe(tiny(seed=1), images))
    with pytest.raises(quant.QuantizationError, match="other weights"):
        quant.calibration_of(tiny(seed=1), half, "int8")


def test_the_metadata_key_is_reserved(model, calibration, tmp_path):
    with pytest.raises(ValueError, match=QUANT_KEY):
        quant.save_quantized(model, calibration, tmp_path / "m.safetensors", {QUANT_KEY: {}})
    with pytest.raises(ValueError, match=r"end in \.safetensors"):
        quant.save_quantized(model, calibration, tmp_path / "m.pt")
    with pytest.raises(quant.QuantizationError, match="two calibrations are named 'int8'"):
        quant.save_ranges(model, [calibration, calibration], tmp_path / "m.json")
    assert list(tmp_path.iterdir()) == []

"""What each layer costs, and the choice of layers."""

import json

import pytest
import torch
from quant_cases import images_like, tiny

from fastswin import quant
from fastswin.quant.sensitivity import SpeedTable
from fastswin.testing.outliers import add_outliers


@pytest.fixture(scope="module")
def stressed():
    """Outliers that int8_mode1 cannot represent, on maps that are even where they merge."""
    model = tiny(image_size=(32, 32))
    with torch.no_grad():
        model.head.weight.mul_(4)
    plain = model(images_like(model, 8)).detach()
    add_outliers(model)
    with torch.no_grad():
        torch.testing.assert_close(
            model(images_like(model, 8)), plain, rtol=0, atol=2e-3 * float(plain.abs().max())
        )
    return model


def data(model, labels=True):
    images = images_like(model, 16, seed=5)
    with torch.no_grad():
        truth = model(images).argmax(1)
    return [(images[:10], truth[:10] if labels else None), (images[10:], truth[10:])][
        : 2 if labels else 1
    ]


def calibrate(model, name):
    return quant.calibrate(model, images_like(model, 8), name)


def test_report_finds_the_layers_with_outliers(stressed):
    report = quant.sensitivity(stressed, calibrate(stressed, "int8_mode1"), data(stressed))
    assert len(report.layers) == 17
    assert report.fp32_top1_percent == 100.0
    worst = [layer.name.rpartition(".")[2] for layer in report.ranked()[:5]]
    assert sorted(worst) == ["fc2", "fc2", "fc2", "fc2", "reduction"]
    for layer in report.layers.values():
        harmful = layer.name.endswith(("fc2", "reduction"))
        assert (layer.snr_db < 62) or not harmful
        assert (layer.alone.cosine < 0.999) == harmful, layer
        assert layer.all_but_this.images == 16
    assert json.loads(json.dumps(report.to_dict()))["quantized"]["images"] == 16


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "no-labels"])
def test_auto_keeps_wide_what_costs_accuracy(stressed, labels):
    calibration = calibrate(stressed, "int8_mode1")
    chosen = quant.choose_layers(stressed, calibration, data(stressed, labels), budget_points=0.0)
    wide = {name for name, r in chosen.layers.items() if not r.scheme.quantized}
    assert wide
    assert {name.rpartition(".")[2] for name in wide} <= {"fc2", "reduction"}
    assert chosen.scheme.name == "int8_mode1_auto"
    quantized = quant.QuantizedSwin(stressed, chosen)
    for images, truth in data(stressed, labels):
        logits = quantized(images)
        assert torch.nn.functional.cosine_similarity(logits, stressed(images)).mean() >= 0.99
        if truth is not None:
            assert torch.equal(logits.argmax(1), truth)


def test_auto_changes_nothing_within_the_budget(stressed):
    calibration = calibrate(stressed, "int8")
    chosen = quant.choose_layers(stressed, calibration, data(stressed))
    assert all(r.scheme.quantized for r in chosen.layers.values())
    assert chosen.scheme.fingerprint == calibration.scheme.fingerprint


def test_auto_keeps_wide_what_brings_no_speed(stressed, tmp_path):
    calibration = calibrate(stressed, "int8")
    slow = "layers.0.blocks.0.attn.proj"
    times = {name: [10.0, 8.0] for name in calibration.layers}
    times[slow] = [6.0, 6.2]
    del times["layers.1.blocks.0.mlp.fc1"]  # not measured: no proof of speed
    path = tmp_path / "h100.json"
    path.write_text(json.dumps({"card": "H100", "batch": 32, "layers": times}))
    chosen = quant.choose_layers(stressed, calibration, data(stressed), speed=SpeedTable.load(path))
    wide = {name for name, r in chosen.layers.items() if not r.scheme.quantized}
    assert wide == {slow, "layers.1.blocks.0.mlp.fc1"}
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"h100\.json: malformed"):
        SpeedTable.load(path)


def test_a_chosen_scheme_survives_its_file(stressed, tmp_path):
    chosen = quant.keep_wide(calibrate(stressed, "int8"), ["layers.0.blocks.0.mlp.fc2"], "mix")
    quant.save_ranges(stressed, chosen, tmp_path / "mix.json")
    found = quant.load_ranges(tmp_path / "mix.json", stressed)["mix"]
    assert found.scheme == chosen.scheme
    images = images_like(stressed)
    found, expected = (quant.QuantizedSwin(stressed, c)(images) for c in (found, chosen))
    assert torch.equal(found, expected)


def test_bad_arguments(stressed):
    calibration = calibrate(stressed, "int8")
    with pytest.raises(ValueError, match="no such layers: head"):
        quant.keep_wide(calibration, ["head"], "x")
    with pytest.raises(ValueError, match="at least one image"):
        quant.sensitivity(stressed, calibration, [])
    images, labels = data(stressed)[0]
    with pytest.raises(ValueError, match="all batches or with none"):
        quant.sensitivity(stressed, calibration, [(images, labels), (images, None)])

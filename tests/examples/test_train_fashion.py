"""The training example: its parts, a short run on the CPU, resuming, and the model card."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fastswin.data.fashion_mnist import PREPROCESS, class_names, fashion_mnist_slice
from fastswin.data.idx import idx_bytes
from fastswin.data.source import open_source

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import fashion_recipe
import train_fashion
import write_model_card
from fashion_recipe import Recipe, augment, learning_rate, mixup

torch.set_num_threads(2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder cut from the shipped slices: 256 training and 16 test images."""
    folder = tmp_path_factory.mktemp("data")
    for stem, name, count in (("train", "calibration", 256), ("t10k", "test", 16)):
        images, labels = fashion_mnist_slice(name)
        (folder / f"{stem}-images-idx3-ubyte.gz").write_bytes(idx_bytes(images[:count]))
        (folder / f"{stem}-labels-idx1-ubyte.gz").write_bytes(idx_bytes(labels[:count]))
    return folder


@pytest.fixture
def images():
    pixels = torch.from_numpy(fashion_mnist_slice("test")[0][:64])
    return PREPROCESS(pixels)


@pytest.fixture
def small(monkeypatch):
    """The recipe's model, narrower."""
    config = fashion_recipe.CONFIG.replace(
        patch_size=4, embed_dim=32, depths=(2,), num_heads=(1,), drop_path_rate=0.0
    )
    monkeypatch.setattr(train_fashion, "CONFIG", config)


def test_the_shipped_models_size():
    model = train_fashion.SwinTransformer(fashion_recipe.CONFIG)
    assert sum(p.numel() for p in model.parameters()) * 4 < 8e6
    assert [fashion_recipe.CONFIG.map_size(s) for s in range(3)] == [(28, 28), (14, 14), (7, 7)]
    assert {fashion_recipe.CONFIG.head_dim(s) for s in range(3)} == {32}


def arguments(data, out, epochs, images=16, batch=16):
    return ["--data", str(data), "--out", str(out), "--epochs", str(epochs), "--batch", str(batch),
            "--device", "cpu", "--minutes", "0", "--limit-train", str(images)]  # fmt: skip


def test_16_steps_bring_the_loss_down(data, tmp_path):
    result = train_fashion.main(arguments(data, tmp_path, 2, 64, 8))
    assert result["losses"][1] < result["losses"][0] - 0.05
    assert result["epochs"] == 2
    assert result["steps"] == 16
    stored = json.loads((tmp_path / "training.json").read_text())
    assert stored == result
    assert stored["seed"] == 0
    assert stored["test_images"] == 16
    weights = tmp_path / "swin_fashion_mnist.safetensors"
    assert weights.stat().st_size < 8e6
    source = open_source(checkpoint=weights)
    assert source.model.config == fashion_recipe.CONFIG
    assert source.preprocess == PREPROCESS
    assert source.class_names == list(class_names())


def test_an_interrupted_run_goes_on_to_the_same_weights(data, tmp_path, small, monkeypatch):
    whole = train_fashion.main(arguments(data, tmp_path / "whole", 10))

    saves = []
    save = train_fashion.Trainer.save

    def save_and_stop(self):
        save(self)
        saves.append(self.epoch)
        if self.epoch == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_fashion.Trainer, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train_fashion.main(arguments(data, tmp_path / "cut", 10))
    assert not (tmp_path / "cut" / "training.json").exists()
    resumed = train_fashion.main(arguments(data, tmp_path / "cut", 10))
    assert saves == [5, 10]
    assert resumed["losses"] == whole["losses"]
    assert resumed["steps"] == whole["steps"] == 10


def test_another_recipe_does_not_resume(data, tmp_path, small):
    train_fashion.main(arguments(data, tmp_path, 1))
    with pytest.raises(SystemExit, match="another recipe"):
        train_fashion.main([*arguments(data, tmp_path, 1), "--seed", "1"])


def test_schedule_ends_annealed_whatever_the_speed(data, tmp_path, small, monkeypatch):
    """Epochs of 20 s in a budget of two minutes: five of at most 50, and progress reaches 1."""
    clock = [0.0]
    monkeypatch.setattr(train_fashion.time, "perf_counter", lambda: clock[0])
    step = train_fashion.Trainer.train_step
    rates = []

    def slow_step(self, *rest):
        clock[0] += 5.0
        rates.append(self.optimizer.param_groups[0]["lr"])
        return step(self, *rest)

    monkeypatch.setattr(train_fashion.Trainer, "train_step", slow_step)
    call = arguments(data, tmp_path, 50, 64)
    call[call.index("--minutes") + 1] = "2"
    result = train_fashion.main(call)
    assert result["epochs"] == 5
    assert result["seconds"] <= 120
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)


def test_learning_rate():
    recipe = Recipe()
    peak = recipe.peak_learning_rate
    assert learning_rate(0.0, recipe) < 0.05 * peak
    assert learning_rate(recipe.warmup_fraction, recipe) == pytest.approx(peak)
    assert learning_rate(1.0, recipe) == pytest.approx(0.0, abs=1e-12)


def test_augmentation_off_is_the_identity(images):
    recipe = Recipe(crop_padding=0, flip_probability=0.0, erase_probability=0.0)
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(augment(images, recipe, generator), images, rtol=0, atol=0)


def test_flip_mirrors_every_image(images):
    recipe = Recipe(crop_padding=0, flip_probability=1.0, erase_probability=0.0)
    generator = torch.Generator().manual_seed(0)
    torch.testing.assert_close(augment(images, recipe, generator), images.flip(3), rtol=0, atol=0)


def test_crop_is_a_shift_of_at_most_the_padding(images):
    recipe = Recipe(crop_padding=2, flip_probability=0.0, erase_probability=0.0)
    shifted = augment(images, recipe, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2), value=fashion_recipe.BLACK)
    side, seen = images.shape[-1], set()
    for image, source in zip(shifted, padded, strict=True):
        matches = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(image, source[:, y : y + side, x : x + side])
        ]
        assert matches
        seen.update(matches[:1])
    assert len(seen) > 10


def test_erasing_is_one_rectangle(images):
    recipe = Recipe(crop_padding=0, flip_probability=0.0, erase_probability=1.0)
    erased = augment(images, recipe, torch.Generator().manual_seed(0))
    for image, source in zip(erased, images, strict=True):
        changed = image[0] != source[0]
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        height, width = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
        assert changed.sum() == height * width
        assert 0.01 < changed.float().mean() < 0.35


def test_mixup_blends_images_and_targets_alike(images):
    labels = torch.arange(64) % 10
    recipe = Recipe(mixup_alpha=0.2, label_smoothing=0.0)
    # one-hot planes as images: then the blended image is the blended target
    planes = torch.nn.functional.one_hot(labels, 10).float().view(64, 1, 1, 10)
    mixed, target = mixup(planes, labels, recipe, torch.Generator().manual_seed(0))
    torch.testing.assert_close(mixed.view(64, 10), target)
    torch.testing.assert_close(target.sum(1), torch.ones(64))
    assert (target.max(1).values < 0.999).sum() > 10


def test_no_mixup_smooths_only(images):
    recipe = Recipe(mixup_alpha=0.0, label_smoothing=0.1)
    mixed, target = mixup(images, torch.full((64,), 3), recipe, torch.Generator())
    assert mixed is images
    assert target[0].tolist() == pytest.approx([0.01] * 3 + [0.91] + [0.01] * 6)


def test_biases_norms_and_tables_do_not_decay():
    model = train_fashion.SwinTransformer(fashion_recipe.CONFIG)
    decay, plain = train_fashion.parameter_groups(model, 0.05)
    assert sum(p.numel() for g in (decay, plain) for p in g["params"]) == sum(
        p.numel() for p in model.parameters()
    )
    assert plain["weight_decay"] == 0.0
    tables = [p for n, p in model.named_parameters() if n.endswith("bias_table")]
    assert all(any(p is q for q in plain["params"]) for p in tables)
    assert all(p.ndim >= 2 for p in decay["params"])


def card_inputs():
    training = {
        "model": "swin_fashion_mnist", "config": fashion_recipe.CONFIG.to_dict(),
        "parameters": 1856262, "recipe": {"batch": 512}, "seed": 0, "train_images": 60000,
        "test_images": 10000, "test_accuracy_percent": 94.567, "epochs": 70, "steps": 8190,
        "seconds": 231.2, "device": "Some GPU", "torch": "2.11.0", "autocast": "bfloat16",
        "compiled": True,
    }  # fmt: skip
    row = {"images": 2000, "top1_percent": 94.35, "top5_percent": 99.9,
           "agreement_percent": 99.95, "max_abs_diff": 0.00321}  # fmt: skip
    evaluation = {"model": "swin_fashion_mnist", "data": "Fashion-MNIST test images 0-1999",
                  "device": "cuda", "device_name": "Some GPU", "batch": 64,
                  "scores": {"reference": row, "fp16": row | {"top1_percent": 94.4}}}  # fmt: skip
    return training, evaluation


def test_model_card_states_what_was_measured(tmp_path):
    training, evaluation = card_inputs()
    files = [tmp_path / "t.json", tmp_path / "e.json", tmp_path / "README.md"]
    files[0].write_text(json.dumps(training))
    files[1].write_text(json.dumps(evaluation))
    names = ["--training", "--evaluation", "--out"]
    write_model_card.main([w for pair in zip(names, map(str, files), strict=True) for w in pair])
    card = files[2].read_text()
    for text in ("**94.57 %**", "94.35", "94.40", "60,000", "seed 0", "70 epochs", "Some GPU",
                 "bfloat16 autocast, torch.compile", "| batch | 512 |", "3.2e-03"):  # fmt: skip
        assert text in card


def test_model_card_of_another_model_is_refused():
    training, evaluation = card_inputs()
    with pytest.raises(ValueError, match="other"):
        write_model_card.model_card(training, evaluation | {"model": "other"})
    del training["seed"]
    with pytest.raises(ValueError, match="seed"):
        write_model_card.model_card(training, evaluation)

"""examples/train.py: loading, and a tiny run that is interrupted and goes on to equal weights."""

import io
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train
from train_data import Augmented, EpochOrder, open_photos

CLASSES, PER_CLASS = 3, 5


def photo(label, number):
    pixels = np.random.default_rng((label, number)).integers(0, 80, (20, 30, 3), np.uint8)
    pixels[..., label] += 120
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("folder")
    for label in range(CLASSES):
        (root / f"class{label}").mkdir()
        for number in range(PER_CLASS):
            (root / f"class{label}" / f"{number}.png").write_bytes(photo(label, number))
    return root


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for label in range(CLASSES):
        with tarfile.open(root / f"{label}.tar", "w") as archive:
            for number in range(PER_CLASS):
                for name, content in (("png", photo(label, number)), ("cls", b"%d\n" % label)):
                    member = tarfile.TarInfo(f"{label}{number}.{name}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return root


def test_folder_and_shards_hold_the_same(folder, shards):
    a, b = open_photos(folder), open_photos(shards)
    assert len(a) == len(b) == CLASSES * PER_CLASS
    assert [a.read(i) for i in range(len(a))] == [b.read(i) for i in range(len(b))]
    assert a.class_names == ["class0", "class1", "class2"]
    assert b.class_names == ["0", "1", "2"]


def test_draws_depend_on_seed_epoch_and_photo_only(folder):
    data = Augmented(open_photos(folder), (16, 24), seed=1)
    image, label = data[2, 7]
    assert image.shape == (3, 16, 24)
    assert label == 1
    assert torch.equal(data[2, 7][0], image)
    assert not torch.equal(data[3, 7][0], image)
    assert not torch.equal(Augmented(open_photos(folder), (16, 24), seed=2)[2, 7][0], image)


def test_epochs_are_dealt_out_once():
    orders = [EpochOrder(26, 4, epoch=1, seed=0, rank=r, world=2) for r in (0, 1)]
    dealt = [i for order in orders for _, i in order]
    assert len(dealt) == len(set(dealt)) == 24
    resumed = EpochOrder(26, 4, epoch=1, seed=0, first_step=1, rank=1, world=2)
    assert list(resumed) == list(orders[1])[4:]
    assert [i for _, i in EpochOrder(26, 4, epoch=2, seed=0)] != [
        i for _, i in EpochOrder(26, 4, epoch=1, seed=0)
    ]


def test_schedule_and_mixup():
    rates = [train.learning_rate(step, 100, 10, 1.0) for step in range(101)]
    assert rates[9] == rates[10] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert math.isclose(rates[100], 0.0, abs_tol=1e-12)
    x, target = torch.arange(4.0).view(4, 1, 1, 1), torch.eye(4)
    mixed, blended = train.mixup(x, target, 0.8, torch.Generator().manual_seed(0))
    weight = blended[0, 0]
    assert 0 < weight < 1
    torch.testing.assert_close(mixed, weight * x + (1 - weight) * x.flip(0))
    torch.testing.assert_close(blended.sum(1), torch.ones(4))
    assert train.mixup(x, target, 0.0, torch.Generator())[0] is x


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the program on a model of a few thousand weights."""
    from fastswin.models import SwinConfig, SwinTransformer

    def tiny(name, **changes):
        config = {"embed_dim": 16, "depths": (2, 1), "num_heads": (1, 2), "window_size": 2}
        return SwinTransformer(SwinConfig(**config | changes))

    monkeypatch.setattr(train.models, "create_model", tiny)

    def call(data, out, *extra):
        arguments = ["--data", data, "--out", tmp_path / out, "--device", "cpu", "--workers", 0]
        arguments += ["--image-size", 16, 24, "--batch", 4, "--epochs", 3, "--warmup", 2]
        return train.main([str(a) for a in [*arguments, "--drop-path", 0.3, *extra]])

    return call


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def test_interrupted_run_ends_with_the_same_weights(run, folder, shards, capsys):
    whole = weights(run(folder, "whole"))
    for _ in range(3):  # 9 steps in pieces of 4: the first two stop within an epoch
        pieces = run(folder, "pieces", "--stop-after", 4)
    assert pieces.step == pieces.steps == 9
    assert "resumed at step 4 of 9" in capsys.readouterr().out
    from_shards = weights(run(shards, "shards"))
    for name, value in whole.items():
        assert torch.equal(weights(pieces)[name], value), name
        assert torch.equal(from_shards[name], value), name


def test_plain_and_accelerated_runs_agree(run, folder):
    fused = weights(run(folder, "fused", "--fp32"))
    plain = weights(run(folder, "plain", "--fp32", "--plain"))
    start = weights(run(folder, "start", "--fp32", "--stop-after", 0))
    moved = sum((plain[n] - start[n]).square().sum() for n in plain)
    apart = sum((plain[n] - fused[n]).square().sum() for n in plain)
    assert 0 < moved
    assert apart < 1e-2 * moved


def test_refusals(run, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="--data"):
        run(tmp_path / "nowhere", "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        run(tmp_path / "empty", "b")
    with pytest.raises(ValueError, match="--batch 64 x 1 exceeds 15 photos"):
        run(folder, "c", "--batch", 64)
    run(folder, "d", "--stop-after", 1)
    with pytest.raises(ValueError, match="belongs to another recipe"):
        run(folder, "d", "--mixup", 0.1)

"""Small models and a runner: commands run in this process, as the entry point runs them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import GREY, PHOTO, PHOTO_CLASSES, make_model

from fastswin.cli.main import run
from fastswin.data.fashion_mnist import PREPROCESS, class_names
from fastswin.data.preprocess import Preprocess, metadata_for
from fastswin.data.shipped import SHIPPED
from fastswin.models import save_checkpoint

torch.set_num_threads(2)


class Finished(NamedTuple):
    """Exit code and both outputs of a command."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    def error_line(self) -> str:
        """The one line on stderr that starts with the program's name."""
        lines = [line for line in self.err.splitlines() if line.startswith("fastswin: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def cli(capsys):
    def call(*arguments: object) -> Finished:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def grey_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "grey.safetensors"
    return save_checkpoint(make_model(GREY), path, metadata_for(PREPROCESS, list(class_names())))


@pytest.fixture(scope="session")
def photo_checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "photo.safetensors"
    preprocess = Preprocess(image_size=(32, 32), crop_ratio=0.9)
    return save_checkpoint(make_model(PHOTO), path, metadata_for(preprocess, PHOTO_CLASSES))


@pytest.fixture
def shipped(monkeypatch, grey_checkpoint):
    """The shipped name stands for a small random model."""
    monkeypatch.setitem(SHIPPED, "swin_fashion_mnist", grey_checkpoint)
    return grey_checkpoint


@pytest.fixture
def photos(tmp_path):
    """Four photos of different sizes and modes."""
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    paths = []
    for index, mode in enumerate(("RGB", "L", "RGBA", "P")):
        path = tmp_path / f"{index}-{mode.lower()}.png"
        image.crop((0, 0, 90 - 20 * index, 60)).convert(mode).save(path)
        paths.append(path)
    return paths

"""Safe reading: what is refused, by which name, and in one line."""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle

import pytest
import torch
from swin_references import our_model

from fastswin.models import CheckpointError, load_checkpoint
from fastswin.models.checkpoint import read_checkpoint


class TrainingSettings:
    """Stands for a yacs node, a Hydra config, a whole pickled model."""


TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}
ZIP = pytest.mark.parametrize("new_format", [True, False], ids=["zip", "legacy"])


def write(path, content, new_format=True):
    torch.save(content, path, _use_new_zipfile_serialization=new_format)
    return path


BLOCKED = {
    "class": (lambda: {"model": TENSORS, "config": TrainingSettings()}, "TrainingSettings"),
    "namespace": (
        lambda: {"model": TENSORS, "args": argparse.Namespace(lr=1)},
        "argparse.Namespace",
    ),
    "path": (
        lambda: {"model": TENSORS, "out": pathlib.PurePosixPath("x")},
        "pathlib.PurePosixPath",
    ),
    "function": (lambda: {"model": TENSORS, "hook": os.system}, "posix.system"),
    "module": (lambda: torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
}


@ZIP
@pytest.mark.parametrize("case", BLOCKED.values(), ids=BLOCKED.keys())
def test_pickles_that_need_code_are_refused_by_name(case, new_format, tmp_path):
    content, name = case
    path = write(tmp_path / "a.pth", content(), new_format)
    with pytest.raises(CheckpointError, match=f"needs code to load: it holds .*{name}") as refused:
        read_checkpoint(path)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, pickle.UnpicklingError)


def test_the_blocked_code_never_ran(tmp_path):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    path = write(tmp_path / "a.pth", {"model": TENSORS, "x": Payload()})
    with pytest.raises(CheckpointError, match=r"needs code to load: it holds posix\.mkdir"):
        load_checkpoint(path)
    assert not (tmp_path / "pwned").exists()


@ZIP
def test_plain_files_are_read(new_format, tmp_path):
    raw = read_checkpoint(
        write(tmp_path / "a.bin", {"state_dict": TENSORS, "epoch": 3}, new_format)
    )
    assert raw.wrapper == "state_dict"
    assert raw.state.keys() == TENSORS.keys()
    assert torch.equal(raw.state["a.weight"], TENSORS["a.weight"])


def test_the_content_decides_not_the_suffix(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "a.pth")
    assert torch.equal(read_checkpoint(tmp_path / "a.pth").state["a.bias"], TENSORS["a.bias"])
    write(tmp_path / "b.safetensors", TENSORS)
    assert torch.equal(read_checkpoint(tmp_path / "b.safetensors").state["a.bias"], torch.ones(2))


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999], ids=lambda k: f"{k:.1%}")
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_files(kind, keep, tmp_path):
    from safetensors.torch import save_file

    path, tensors = tmp_path / "a", {f"t{i}": torch.randn(20, 30) for i in range(20)}
    if kind == "safetensors":
        save_file(tensors, path)
    else:
        write(path, tensors, kind == "zip")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CheckpointError, match=r"truncated or damaged|neither a safetensors") as e:
        read_checkpoint(path)
    assert "\n" not in str(e.value)


NO_CHECKPOINT = {
    "text": (b"hello world, this is no checkpoint", "neither a safetensors nor a PyTorch file"),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(40), "neither a safetensors nor a PyTorch file"),
    "random-zip": (b"PK\x03\x04" + bytes(200), "truncated or damaged"),
    "random-pickle": (b"\x80\x02" + bytes(range(200)), "truncated or damaged"),
    "random-header": (bytes([255] * 8) + b"{" + bytes(50), "truncated or damaged safetensors"),
}


@pytest.mark.parametrize("case", NO_CHECKPOINT.values(), ids=NO_CHECKPOINT.keys())
def test_other_files(case, tmp_path):
    content, message = case
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_checkpoint(tmp_path / "a.pth")
    assert "\n" not in str(refused.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none.pth")
    with pytest.raises(CheckpointError, match="is a folder"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [({}, "no tensors found"), ({"epoch": 3}, "no tensors found"),
     ([torch.ones(2)], "is a list, expected a dict"), (torch.ones(2), "is a Tensor, expected")],
    ids=["empty", "numbers", "list", "tensor"],
)  # fmt: skip
def test_files_without_weights(content, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(write(tmp_path / "a.pth", content))


def test_a_swin_file_of_torch(tmp_path):
    model = our_model(1)
    loaded = load_checkpoint(write(tmp_path / "a.pth", {"model": model.state_dict()}))
    assert torch.equal(loaded.model.head.weight, model.head.weight)

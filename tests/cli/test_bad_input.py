"""Bad input of every kind: the right exit code, one line that names the argument, no output."""

import builtins
import importlib.util
import os
import pickle

import pytest
import torch
from PIL import Image
from small_models import PHOTO, make_model

from fastswin.cli import exit_codes
from fastswin.cli.exit_codes import CheckFailedError, explain
from fastswin.cli.main import run
from fastswin.data.shipped import SHIPPED
from fastswin.engine import Engine


def refused(done, code, *words):
    line = done.error_line()
    assert done.code == code, line
    assert done.out == ""
    for word in words:
        assert word in line, line


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "absent", "folder"])
def test_unreadable_photo(cli, photo_checkpoint, photos, tmp_path, kind):
    bad = tmp_path / "bad.png"
    if kind == "truncated":
        bad.write_bytes(photos[0].read_bytes()[:4000])
    elif kind == "folder":
        bad.mkdir()
    elif kind != "absent":
        bad.write_bytes(b"" if kind == "empty" else b"not an image")
    done = cli("classify", photos[1], bad, "--checkpoint", photo_checkpoint, "--device", "cpu",
               "--json")  # fmt: skip
    refused(done, 2, "bad.png")


@pytest.mark.parametrize("command", [["classify", "a.png"], ["evaluate"], ["bench", "model"]])
def test_unknown_model_shows_the_nearest(cli, command):
    done = cli(*command, "--model", "swin_tiny_patch4_windw7_224", "--json")
    refused(done, 2, "model", "swin_tiny_patch4_windw7_224", "swin_tiny_patch4_window7_224")


def test_beginning_of_a_name_shows_what_begins_so(cli):
    refused(cli("classify", "a.png", "--model", "swin_tiny"), 2, "swin_tiny_patch4_window7_224")


def test_no_model(cli, photos):
    refused(cli("classify", photos[0]), 2, "--model", "--checkpoint")


class Payload:
    def __reduce__(self):
        return builtins.exec, ("import os; os.environ['FASTSWIN_TEST_OWNED'] = '1'",)


def checkpoint_file(tmp_path, kind):
    path = tmp_path / f"{kind}.pth"
    if kind == "pickle-with-code":
        torch.save({"model": Payload()}, path)
    elif kind == "plain-pickle-with-code":
        path.write_bytes(pickle.dumps(Payload()))
    elif kind == "convolutional-stem":
        layers = {"stem.conv1.weight": (32, 3, 3, 3), "stem.conv2.weight": (64, 32, 3, 3),
                  "layer1.0.conv1.weight": (64, 64, 3, 3), "fc.weight": (1000, 512)}  # fmt: skip
        torch.save({name: torch.zeros(shape) for name, shape in layers.items()}, path)
    elif kind == "text":
        path.write_text("no checkpoint")
    elif kind == "empty-dict":
        torch.save({}, path)
    elif kind == "truncated":
        torch.save(make_model(PHOTO).state_dict(), path)
        path.write_bytes(path.read_bytes()[:2000])
    return path


@pytest.mark.parametrize(
    "kind",
    ["pickle-with-code", "plain-pickle-with-code", "convolutional-stem", "text", "empty-dict",
     "truncated", "absent"],
)  # fmt: skip
def test_checkpoint_that_is_no_swin(cli, photos, tmp_path, kind, monkeypatch):
    monkeypatch.delenv("FASTSWIN_TEST_OWNED", raising=False)
    path = checkpoint_file(tmp_path, kind)
    done = cli("classify", photos[0], "--checkpoint", path, "--device", "cpu")
    assert done.code == 2
    assert len(done.error_line()) > len("fastswin: ")
    assert done.out == ""
    assert "FASTSWIN_TEST_OWNED" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "fp17"], ["precision", "fp17", "fp16"]),
        (["--precision", "tf32", "--device", "cpu"], ["precision", "tf32"]),
        (["--top", "0"], ["--top"]),
        (["--top", "many"], ["--top"]),
        (["--batch", "0"], ["--batch"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--device", "meta"], ["--device", "meta"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) and value[0][0] == "-" else "",
)
def test_illegal_option_values(cli, photo_checkpoint, photos, arguments, words):
    done = cli("classify", photos[0], "--checkpoint", photo_checkpoint, *arguments)
    refused(done, 2, *words)


def test_a_gpu_that_is_not_there(cli, photo_checkpoint, photos):
    done = cli("classify", photos[0], "--checkpoint", photo_checkpoint, "--device", "cuda:99")
    refused(done, 3, "cuda:99", "doctor")


def test_unknown_command(cli):
    refused(cli("clasify"), 2, "clasify")


def test_missing_shipped_weights(cli, monkeypatch, tmp_path):
    monkeypatch.setitem(SHIPPED, "swin_fashion_mnist", tmp_path / "absent.safetensors")
    out = tmp_path / "report"
    refused(cli("demo", "--out", out, "--device", "cpu"), 3, "swin_fashion_mnist")
    assert not list(out.glob("report*"))


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra(monkeypatch, capsys, missing):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == missing else real(name, *a)
    )
    assert run(["doctor"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'fastswin[cli]'" in captured.err
    assert missing in captured.err


def test_without_pillow(cli, monkeypatch, photo_checkpoint, photos):
    real = builtins.__import__

    def no_pillow(name, *rest, **named):
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    done = cli("classify", photos[0], "--checkpoint", photo_checkpoint, "--device", "cpu")
    refused(done, 3, "fastswin[vision]")


def test_evaluate_refuses_data_that_does_not_fit(cli, photo_checkpoint, tmp_path):
    common = [
        "evaluate",
        "--checkpoint",
        photo_checkpoint,
        "--device",
        "cpu",
        "--precision",
        "fp32",
    ]
    refused(cli(*common), 2, "28x28", "data")
    refused(cli(*common, "--data", tmp_path / "absent"), 2, "data", "absent")
    refused(cli(*common, "--labels", tmp_path / "l.txt"), 2, "labels")
    (tmp_path / "one").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "one" / "a.png")
    refused(cli(*common, "--data", tmp_path), 2, "data", "class folders")
    labels = tmp_path / "labels.txt"
    labels.write_text("one/a.png 6\n")
    refused(cli(*common, "--data", tmp_path, "--labels", labels), 2, "labels", "line 1")


def test_evaluate_fails_where_a_gate_is_red(cli, shipped, monkeypatch):
    original = Engine.__call__
    monkeypatch.setattr(Engine, "__call__", lambda self, images: original(self, images).flip(1))
    done = cli("evaluate", "--limit", 30, "--precision", "fp32", "--device", "cpu", "--json")
    assert done.code == 1
    assert done.json()["failures"]
    assert "fp32" in done.err
    assert "check failed" in done.err


@pytest.mark.parametrize(
    "arguments",
    [["--suite", "nets"], ["--batch", "0"], ["--batch", "1,,2"], ["--dtype", "fp17"],
     ["--variant", "magic"], ["--seconds", "-1"], ["--model", ""]],
    ids="-".join,
)  # fmt: skip
def test_bench_refuses_before_writing(cli, shipped, tmp_path, arguments):
    base = [] if "--model" in arguments else ["--model", "swin_fashion_mnist"]
    done = cli("bench", "model", *base, "--device", "cpu", "--out", tmp_path, *arguments)
    refused(done, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("images", "error", "word"),
    [
        (torch.zeros(3, 32, 32), ValueError, "4 dimensions"),
        (torch.zeros(1, 1, 32, 32), ValueError, "3 channels"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), TypeError, "float"),
        (torch.zeros(1, 3, 3, 3), ValueError, "smaller than one patch"),
        (torch.zeros(1, 3, 32, 32, device="meta"), ValueError, "images are on meta"),
        ([[0.0]], TypeError, "images"),
    ],
    ids=["rank", "channels", "dtype", "too-small", "device", "list"],
)
def test_engine_refuses_images_in_one_line(images, error, word):
    engine = Engine(make_model(PHOTO), "fp32", device="cpu")
    with pytest.raises(error, match=word) as caught:
        engine(images)
    assert "\n" not in str(caught.value)
    assert explain(caught.value) == (exit_codes.BAD_INPUT, str(caught.value))


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [
        (CheckFailedError("fp16: red"), 1, "check failed: fp16: red"),
        (ValueError("a\nb"), 2, "a"),
        (TypeError("t"), 2, "t"),
        (PermissionError(13, "Permission denied", "out.json"), 2, "out.json: Permission denied"),
        (ImportError("pip install"), 3, "pip install"),
        (RuntimeError("no driver"), 3, "no driver"),
        (torch.OutOfMemoryError("CUDA out of memory"), 3, "--batch"),
        (KeyError("k"), 4, "internal error: KeyError"),
        (ValueError(""), 2, "no message"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_exit_codes(error, code, word):
    found, line = explain(error)
    assert found == code
    assert word in line
    assert "\n" not in line


def test_debug_adds_the_traceback(cli, photos):
    done = cli("classify", photos[0], "--debug")
    assert done.code == 2
    assert "Traceback" in done.err


def test_output_that_cannot_be_written(cli, shipped, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    done = cli("demo", "--out", blocker, "--device", "cpu")
    refused(done, 2, "file")
    assert blocker.read_text() == "in the way"

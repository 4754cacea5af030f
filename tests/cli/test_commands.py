"""Every command does its job, as a table and as JSON."""

import subprocess
import sys

import pytest
import torch
from PIL import Image
from small_models import PHOTO, PHOTO_CLASSES, make_model

import fastswin
from fastswin.data.images import load_images
from fastswin.data.source import open_source
from fastswin.models import list_models, save_checkpoint


def test_help_lists_commands_and_exit_codes(cli):
    for arguments in ([], ["--help"]):
        done = cli(*arguments)
        assert done.code == 0
        for word in ("demo", "classify", "bench", "evaluate", "models", "doctor", "Exit codes"):
            assert word in done.out


def test_version(cli):
    done = cli("--version")
    assert (done.code, done.out.strip()) == (0, f"fastswin {fastswin.__version__}")


@pytest.mark.parametrize(
    "command", [["classify"], ["evaluate"], ["models"], ["doctor"], ["demo"], ["bench", "model"]],
    ids=" ".join,
)  # fmt: skip
def test_every_command_has_json(cli, command):
    done = cli(*command, "--help")
    assert done.code == 0
    assert "--json" in done.out


def test_classify_is_the_models_softmax(cli, photo_checkpoint, photos):
    done = cli("classify", *photos, "--checkpoint", photo_checkpoint, "--top", 3, "--json",
               "--device", "cpu", "--precision", "fp32", "--batch", 3)  # fmt: skip
    assert done.code == 0
    document = done.json()
    source = open_source(checkpoint=photo_checkpoint)
    with torch.no_grad():
        pixels = load_images(photos, source.preprocess)
        probabilities = source.model(source.preprocess(pixels)).softmax(1)
    assert [image["image"] for image in document["images"]] == [str(p) for p in photos]
    for image, row in zip(document["images"], probabilities, strict=True):
        values, indices = row.topk(3)
        assert [g["index"] for g in image["guesses"]] == indices.tolist()
        assert [g["name"] for g in image["guesses"]] == [PHOTO_CLASSES[i] for i in indices]
        found = torch.tensor([g["probability"] for g in image["guesses"]])
        torch.testing.assert_close(found, values, atol=1e-5, rtol=0)


def test_classify_table(cli, photo_checkpoint, photos):
    done = cli("classify", photos[0], "--checkpoint", photo_checkpoint, "--device", "cpu")
    assert done.code == 0
    assert photos[0].name in done.out
    assert sum(name in done.out for name in PHOTO_CLASSES) == 5


def test_classify_takes_the_shipped_name(cli, shipped, photos):
    done = cli("classify", *photos, "--model", "swin_fashion_mnist", "--json", "--device", "cpu")
    assert done.code == 0
    assert done.json()["images"][0]["guesses"][0]["name"]


def test_classes_without_names_are_numbered(cli, tmp_path, photos):
    path = save_checkpoint(make_model(PHOTO), tmp_path / "bare.safetensors")
    done = cli("classify", photos[0], "--checkpoint", path, "--json", "--device", "cpu")
    assert done.json()["images"][0]["guesses"][0]["name"].startswith("class ")


def test_evaluate_on_the_shipped_slice(cli, shipped):
    done = cli("evaluate", "--limit", 100, "--precision", "fp32,bf16", "--device", "cpu",
               "--tolerance", 100, "--json")  # fmt: skip
    assert done.code == 0
    document = done.json()
    assert list(document["scores"]) == ["reference", "fp32", "bf16"]
    assert document["scores"]["fp32"]["images"] == 100
    assert document["scores"]["fp32"]["agreement_percent"] == 100.0
    assert document["scores"]["fp32"]["max_abs_diff"] < 1e-4
    assert document["failures"] == []


def test_evaluate_table_and_repeated_option(cli, shipped):
    done = cli("evaluate", "--limit", 20, "--precision", "fp32", "--precision", "bf16",
               "--device", "cpu", "--tolerance", 100)  # fmt: skip
    assert done.code == 0
    for word in ("reference", "fp32", "bf16", "top-1 %", "20 images"):
        assert word in done.out


def test_evaluate_on_a_folder(cli, photo_checkpoint, tmp_path):
    root = tmp_path / "val"
    for index, name in enumerate(PHOTO_CLASSES):
        (root / name).mkdir(parents=True)
        Image.new("RGB", (40, 50), (40 * index, 10, 99)).save(root / name / "a.png")
    done = cli("evaluate", "--checkpoint", photo_checkpoint, "--data", root, "--precision", "fp32",
               "--device", "cpu", "--json")  # fmt: skip
    assert done.code == 0
    assert done.json()["scores"]["reference"]["images"] == 6


def test_models_lists_every_variant_with_its_parameters(cli):
    done = cli("models", "--json")
    assert done.code == 0
    rows = {row["name"]: row for row in done.json()}
    assert set(list_models()) <= set(rows)
    # timm's published sizes, in millions
    assert rows["swin_tiny_patch4_window7_224"]["parameters"] / 1e6 == pytest.approx(
        28.29, abs=0.01
    )
    assert rows["swinv2_base_window8_256"]["parameters"] / 1e6 == pytest.approx(87.92, abs=0.02)


def test_models_table(cli, shipped):
    done = cli("models")
    assert done.code == 0
    line = next(line for line in done.out.splitlines() if "swin_fashion_mnist" in line)
    assert "shipped" in line
    assert "28x28" in line


def test_doctor(cli):
    done = cli("doctor", "--json")
    assert done.code == 0
    document = done.json()
    assert document["versions"]["torch"] == torch.__version__
    assert [p["name"] for p in document["precisions"]] == ["fp32", "tf32", "fp16", "bf16"]
    assert all("reason" in row for key in ("gpus", "precisions", "backends", "packages",
                                           "shipped_models") for row in document[key])  # fmt: skip
    assert document["precisions"][0]["reason"] is None
    table = cli("doctor")
    assert table.code == 0
    assert "optional packages" in table.out


def test_doctor_says_why_not(cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    document = cli("doctor", "--json").json()
    reasons = {row["name"]: row["reason"] for row in document["backends"]}
    assert "GPU" in reasons["cuda graphs"] or "CUDA" in reasons["cuda graphs"]
    assert reasons["triton kernels"]
    assert reasons["pytorch reference"] is None
    assert "NVIDIA GPU" in {p["name"]: p for p in document["precisions"]}["tf32"]["reason"]


def test_bench_model_writes_a_record(cli, shipped, tmp_path, brief_timing):
    done = cli("bench", "model", "--model", "swin_fashion_mnist", "--dtype", "fp32", "--batch", 2,
               "--variant", "fastswin,eager", "--device", "cpu", "--out", tmp_path, "--seconds",
               0.05, "--json")  # fmt: skip
    assert done.code == 0, done.err
    records = done.json()["records"]
    assert {r["variant"] for r in records} == {"fastswin", "eager"}
    assert all(r["median_ms"] > 0 and r["max_abs_err"] < 1e-4 for r in records)
    assert len(list(tmp_path.rglob("model.json"))) == 1


def test_entry_point_as_a_process():
    done = subprocess.run(
        [sys.executable, "-m", "fastswin.cli.main", "classify"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "images" in done.stderr

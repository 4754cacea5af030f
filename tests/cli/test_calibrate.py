"""``fastswin calibrate`` and quantised rows of ``fastswin evaluate``, alone and under torchrun."""

import io
import json
import os
import socket
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import PHOTO_CLASSES

from fastswin.models import load_checkpoint
from fastswin.quant import load_quantized, load_ranges


@pytest.fixture
def folder(tmp_path):
    """Twelve labelled photos, two a class."""
    generator = np.random.default_rng(3)
    root = tmp_path / "photos"
    for index in range(12):
        path = root / PHOTO_CLASSES[index % 6] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return root


def test_ranges_of_several_schemes_and_their_evaluation(cli, shipped, tmp_path):
    out = tmp_path / "ranges.json"
    common = ["--images", 24, "--batch", 8, "--device", "cpu"]
    done = cli("calibrate", "--scheme", "int8,fp8", "--out", out, *common, "--json")
    assert done.code == 0, done.err
    report = done.json()
    assert (report["images"], list(report["calibrations"])) == (24, ["int8", "fp8"])
    assert set(load_ranges(out, load_checkpoint(shipped).model)) == {"int8", "fp8"}
    again = tmp_path / "again.json"
    assert cli("calibrate", "--scheme", "int8,fp8", "--out", again, *common).code == 0
    assert again.read_bytes() == out.read_bytes()
    done = cli("evaluate", "--precision", "fp32,int8,fp8", "--calibration", out, "--limit", 40,
               "--device", "cpu", "--quantized-tolerance", 10, "--json")  # fmt: skip
    assert done.code == 0, done.err
    scores = done.json()["scores"]
    assert list(scores) == ["reference", "fp32", "int8", "fp8"]
    assert scores["fp32"]["max_abs_diff"] < 1e-4 < scores["int8"]["max_abs_diff"]
    assert scores["int8"]["agreement_percent"] >= 90
    assert done.json()["calibrations"]["int8"]["images"] == 24


def test_a_calibrated_checkpoint_stands_alone(cli, photo_checkpoint, folder, tmp_path):
    out = tmp_path / "photo-8bit.safetensors"
    done = cli("calibrate", "--checkpoint", photo_checkpoint, "--data", folder, "--images", 6,
               "--out", out, "--report", "--device", "cpu")  # fmt: skip
    assert done.code == 0, done.err
    assert "logits SNR dB alone" in done.out
    assert "layers.0.downsample.reduction" in done.out
    loaded = load_quantized(out)
    assert loaded.calibrations["int8"].images == 6
    assert loaded.metadata["fastswin_classes"] == PHOTO_CLASSES
    done = cli("evaluate", "--checkpoint", out, "--data", folder, "--precision", "int8",
               "--quantized-tolerance", 100, "--device", "cpu", "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert done.json()["scores"]["int8"]["images"] == 12


def test_auto_says_what_stays_wide(cli, photo_checkpoint, folder, tmp_path):
    speed = tmp_path / "speed.json"
    layers = {"layers.1.blocks.0.attn.proj": [2.0, 3.0]}
    quantized = load_checkpoint(photo_checkpoint).model.state_dict()
    for name in quantized:
        if name.endswith((".qkv.weight", ".proj.weight", "fc1.weight", "fc2.weight")):
            layers.setdefault(name.removesuffix(".weight"), [3.0, 2.0])
    speed.write_text(json.dumps({"card": "test", "batch": 1, "layers": layers}))
    done = cli("calibrate", "--checkpoint", photo_checkpoint, "--data", folder, "--auto",
               "--speed", speed, "--budget", 100, "--out", tmp_path / "a.json", "--device", "cpu",
               "--json")  # fmt: skip
    assert done.code == 0, done.err
    assert done.json()["wide"] == {
        "int8_auto": ["layers.0.downsample.reduction", "layers.1.blocks.0.attn.proj"]
    }


def test_tar_shards(cli, photo_checkpoint, folder, tmp_path):
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            archive.add(path, f"{path.parent.name}/{path.name}")
            content = str(PHOTO_CLASSES.index(path.parent.name)).encode()
            info = tarfile.TarInfo(f"{path.parent.name}/{path.stem}.cls")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    common = ["--checkpoint", photo_checkpoint, "--precision", "fp32", "--device", "cpu", "--json"]
    from_tar = cli("evaluate", *common, "--data", tmp_path / "photos.tar").json()["scores"]
    from_folder = cli("evaluate", *common, "--data", folder).json()["scores"]
    for row in ("reference", "fp32"):
        for key in ("images", "top1_percent", "top5_percent", "max_abs_diff"):
            assert from_tar[row][key] == from_folder[row][key]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["calibrate", "--out", "ranges.pt"], [".safetensors or .json"]),
        (["calibrate", "--out", "r.json", "--scheme", "int9"], ["int9", "int8_mode1"]),
        (["calibrate", "--out", "r.json", "--speed", "s.json"], ["--speed needs --auto"]),
        (["evaluate", "--precision", "int8"], ["'int8' needs ranges", "fastswin calibrate"]),
        (["evaluate", "--precision", "int8", "--calibration", "absent.json"], ["absent.json"]),
    ],
    ids=["suffix", "scheme", "speed", "uncalibrated", "absent"],
)
def test_bad_input(cli, shipped, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    done = cli(*arguments, "--device", "cpu")
    assert done.code == 2
    for word in words:
        assert word in done.error_line()
    assert list(tmp_path.iterdir()) == []


def test_ranges_of_other_weights_are_refused(cli, shipped, photo_checkpoint, folder, tmp_path):
    out = tmp_path / "other.json"
    assert cli("calibrate", "--images", 4, "--out", out, "--device", "cpu").code == 0
    done = cli("evaluate", "--checkpoint", photo_checkpoint, "--data", folder, "--precision",
               "int8", "--calibration", out, "--device", "cpu")  # fmt: skip
    assert done.code == 2
    assert "made for other weights" in done.error_line()


PROGRAM = """
import os
import sys
from fastswin.cli.main import run
data, ranges = sys.argv[1:3]
common = ["--checkpoint", sys.argv[3], "--data", data, "--device", "cpu", "--batch", "1"]
code = run(["calibrate", "--out", ranges, *common])
os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]  # torchrun starts one command, not two
code = code or run(["evaluate", "--precision", "int8", "--calibration", sys.argv[4],
                    "--quantized-tolerance", "100", "--json", *common])
sys.exit(code)
"""


@pytest.fixture
def one_thread():
    """Sums in the order of the processes below."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_find_the_ranges_and_scores_of_one(cli, photo_checkpoint, folder, tmp_path):
    """As torchrun starts them, over the CPU's gloo: equal bytes and counts, one document."""
    with socket.socket() as first, socket.socket() as second:
        ports = []
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
            ports.append(str(probe.getsockname()[1]))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": ports[0], "SECOND_PORT": ports[1],
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    alone, spread = tmp_path / "alone.json", tmp_path / "spread.json"

    def start(rank):
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folder, spread, photo_checkpoint, spread],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment | variables,
        )  # fmt: skip

    processes = [start(rank) for rank in (0, 1)]
    common = ["--checkpoint", photo_checkpoint, "--data", folder, "--device", "cpu", "--batch", 1]
    assert cli("calibrate", "--out", alone, *common).code == 0
    done = cli("evaluate", "--precision", "int8", "--calibration", alone, "--quantized-tolerance",
               100, "--json", *common)  # fmt: skip
    assert done.code == 0, done.err
    printed = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-2000:]
            printed.append(out[out.find("{") :] if "{" in out else "")
    finally:
        for process in processes:
            process.kill()
    assert alone.read_bytes() == spread.read_bytes()
    assert printed[1] == ""
    one, two = done.json(), json.loads(printed[0])
    assert (one["processes"], two["processes"]) == (1, 2)
    for row, values in one["scores"].items():
        for key in ("images", "top1_percent", "top5_percent", "agreement_percent"):
            assert two["scores"][row][key] == values[key]

"""The wheel holds what an installation needs; files that repeat a fact agree with its source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fastswin

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
ROOMS = sorted(
    p.stem
    for p in (ROOT / "fastswin").iterdir()
    if (p.suffix == ".py" or (p / "__init__.py").exists()) and p.stem != "__init__"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_wheel_is_pure_python_and_carries_the_version(wheel):
    assert Path(wheel.filename).name == f"fastswin-{fastswin.__version__}-py3-none-any.whl"
    (tags,) = [n for n in wheel.namelist() if n.endswith(".dist-info/WHEEL")]
    assert "Root-Is-Purelib: true" in wheel.read(tags).decode()
    (entry,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    assert "fastswin = fastswin.cli.main:main" in wheel.read(entry).decode()


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    files = {
        str(p.relative_to(ROOT))
        for p in (ROOT / "fastswin").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert {n for n in wheel.namelist() if ".dist-info/" not in n} == files
    assert "fastswin/py.typed" in files
    assert {n.rpartition("/")[2] for n in files if "assets/fashion_mnist" in n} >= {
        "LICENSE",
        "classes.json",
        "test_2000-images-idx3-ubyte.gz",
        "test_2000-labels-idx1-ubyte.gz",
        "train_512-images-idx3-ubyte.gz",
        "train_512-labels-idx1-ubyte.gz",
    }


def test_wheel_carries_the_licence(wheel):
    (name,) = [n for n in wheel.namelist() if n.endswith("licenses/LICENSE")]
    assert wheel.read(name).decode() == (ROOT / "LICENSE").read_text()


def test_version_is_written_once():
    assert 'dynamic = ["version"]' in PYPROJECT
    assert not re.search(r"^version\s*=", PYPROJECT, re.MULTILINE)
    assert re.match(r"\d+\.\d+\.\d+$", fastswin.__version__)
    assert f"\n## {fastswin.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_pre_commit_runs_the_pinned_ruff():
    (pinned,) = re.findall(r'"ruff==([\d.]+)"', PYPROJECT)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"ruff-pre-commit\n    rev: v{pinned}\n" in hooks


@pytest.mark.parametrize("room", ROOMS)
def test_architecture_names_every_room(room):
    tree = (ROOT / "docs" / "architecture.md").read_text()
    assert re.search(rf"^  {room}(/|\.py) ", tree, re.MULTILINE)


def test_architecture_names_no_room_that_is_not_there():
    tree = (ROOT / "docs" / "architecture.md").read_text()
    block = tree[tree.index("fastswin/\n") : tree.index("```", tree.index("fastswin/\n"))]
    named = re.findall(r"^  (\w+)(?:/|\.py) ", block, re.MULTILINE)
    assert sorted(named) == sorted([*ROOMS, "assets", "__init__"])


def test_every_environment_variable_is_documented():
    page = (ROOT / "docs" / "environment.md").read_text()
    source = "\n".join(p.read_text() for p in (ROOT / "fastswin").rglob("*.py"))
    read = set(re.findall(r"\b(?:FASTSWIN|TRITON)_[A-Z][A-Z_]+\b", source)) - {"TRITON_INSTALLED"}
    assert read
    assert {name for name in read if f"`{name}" not in page} == set()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda page: page.name,
)  # fmt: skip
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_checkout_has_the_command_line_without_an_installation():
    done = subprocess.run(
        [sys.executable, "-m", "fastswin", "models", "--help"],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Usage: fastswin models" in done.stdout

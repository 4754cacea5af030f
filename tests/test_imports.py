"""Imports go one way, and nothing optional is needed to import fastswin and run the reference."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fastswin"

#: Rooms from the bottom up; a room imports rooms of lower levels only. "" is the package itself.
LEVELS = (
    {"_triton", "testing"},
    {"ops"},
    {"nn", "models", "tuning"},
    {"quant"},
    {"accelerate", "engine"},
    {""},
    {"data"},
    {"export"},
    {"bench"},
    {"evaluation", "classification", "doctor"},
    {"demo"},
    {"cli"},
    {"__main__"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}

#: Tests and benchmarks share tolerances; nothing that a user runs depends on them.
TESTING_USERS = {"testing", "bench"}

OPTIONAL = {
    "triton", "timm", "torchvision", "transformers", "PIL", "typer", "rich", "matplotlib",
    "onnx", "onnx_ir", "onnxscript", "onnxruntime", "openvino",
}  # fmt: skip


MODULES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_kernel(path: Path) -> bool:
    """Files that hold Triton functions and are imported only where a kernel is launched."""
    if room_of(name_of(path)) not in ("ops", "export", "_triton"):
        return False
    if path.stem in ("forward", "backward", "kernel"):
        return True
    text = path.read_text()
    return "\nimport triton\n" in text or "\nfrom triton.experimental import gluon\n" in text


def is_command(path: Path) -> bool:
    """Files that need typer; ``cli.main`` imports them once it knows that typer is there."""
    return room_of(name_of(path)) == "cli" and path.stem not in ("__init__", "main", "exit_codes")


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Full names that a file imports; without ``everywhere`` only what runs when it is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the room they come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            yield from imports(node, everywhere=everywhere)


def imported_room(name: str) -> str | None:
    """The room that an import reaches; None outside fastswin. ``fastswin.Engine`` is the root's."""
    head, _, rest = name.partition(".")
    if head != "fastswin":
        return None
    room = rest.split(".")[0]
    return room if room in LEVEL else ""


def test_every_room_has_a_level():
    assert {room_of(name_of(path)) for path in MODULES} == set(LEVEL)


def test_imports_go_down():
    upward = []
    for path, tree in MODULES.items():
        room = room_of(name_of(path))
        reached = {imported_room(name) for name in imports(tree, everywhere=True)} - {None, room}
        upward += [(name_of(path), r) for r in reached if LEVEL[r] >= LEVEL[room]]
        upward += [(name_of(path), r) for r in reached & {"testing"} if room not in TESTING_USERS]
    assert upward == []


def test_optional_packages_are_imported_late():
    early = []
    for path, tree in MODULES.items():
        allowed = set()
        if is_kernel(path):
            allowed = {"triton"}
        elif is_command(path):
            allowed = {"typer", "rich"}
        found = {name.split(".")[0] for name in imports(tree, everywhere=False)}
        early += [(name_of(path), package) for package in found & OPTIONAL - allowed]
    assert early == []


def test_kernels_and_commands_are_imported_late():
    """So that schemas exist where Triton does not, and the entry point where typer does not."""
    for kind in (is_kernel, is_command):
        late = {name_of(path) for path in MODULES if kind(path)}
        early = []
        for path, tree in MODULES.items():
            names = set(imports(tree, everywhere=False))
            names |= {name.rpartition(".")[0] for name in names}
            early += [(name_of(path), name) for name in names & late if not kind(path)]
        assert early == []


WITHOUT_OPTIONAL = f"""
import sys
OPTIONAL = {OPTIONAL!r}

class Without:
    # finds nothing of an optional package, as on a machine that lacks it
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def run_without_optional(program: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_OPTIONAL + program],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


def test_engine_and_operators_run_without_any_optional_package():
    done = run_without_optional("""
import torch
from fastswin import Engine, models, ops

torch.set_num_threads(1)
torch.manual_seed(0)
for version in (1, 2):
    config = models.SwinConfig(
        version=version, image_size=(32, 48), embed_dim=24, depths=(2, 2), num_heads=(2, 4),
        window_size=4, num_classes=5,
    )
    model = models.SwinTransformer(config).eval()
    engine = Engine(model, "fp32", device="cpu")
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        torch.testing.assert_close(engine(images), model(images), rtol=0, atol=1e-5)
    assert [tuple(f.shape) for f in engine.features(images)] == [(2, 24, 8, 12), (2, 48, 4, 6)]
qkv = torch.randn(2, 5, 6, 24)
y = ops.window_attention(qkv, num_heads=2, window_size=(3, 4), shift_size=(1, 2))
assert y.shape == (2, 5, 6, 8) and bool(y.isfinite().all())
rows = ops.layer_norm(torch.randn(3, 24))
assert abs(rows.mean().item()) < 1e-6
try:
    ops.layer_norm(rows, impl="triton")
except RuntimeError as error:
    assert "Triton is not installed" in str(error)
else:
    raise AssertionError("impl='triton' ran without Triton")
assert not OPTIONAL & {name.partition(".")[0] for name in sys.modules}
""")
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_module_but_kernels_and_commands_imports_without_optional_packages():
    names = [name_of(path) for path in MODULES if not is_kernel(path) and not is_command(path)]
    done = run_without_optional(f"""
import importlib
for name in {names!r}:
    importlib.import_module(name)
""")
    assert done.returncode == 0, done.stderr[-2000:]


def test_command_says_which_extra_it_needs():
    done = run_without_optional("from fastswin.cli.main import run; sys.exit(run(['doctor']))")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'fastswin[cli]'")
    assert len(done.stderr.strip().splitlines()) == 1


def test_operators_alone_load_no_model_code():
    """A process that serves a saved program needs their registration only."""
    done = run_without_optional("""
import fastswin
assert [m for m in sys.modules if m.startswith("fastswin")] == ["fastswin"]
import fastswin.ops
rooms = {m.split(".")[1] for m in sys.modules if m.startswith("fastswin.")}
assert rooms == {"ops", "_triton"}, rooms
""")
    assert done.returncode == 0, done.stderr[-2000:]


def test_public_names_are_there_whatever_was_imported_first():
    done = run_without_optional("""
import fastswin.accelerate.api                     # a room with the name of a public function
import fastswin
assert set(fastswin.__all__) <= set(dir(fastswin))
assert fastswin.accelerate is fastswin.accelerate.__globals__["accelerate"]
from fastswin import *
from fastswin.engine import Engine as engine
assert Engine is engine and callable(accelerate) and callable(restore)
assert models.__name__ == "fastswin.models" and ops.__name__ == "fastswin.ops"
try:
    fastswin.engines
except AttributeError as error:
    assert str(error) == "module 'fastswin' has no attribute 'engines'"
else:
    raise AssertionError("an unknown name was found")
""")
    assert done.returncode == 0, done.stderr[-2000:]

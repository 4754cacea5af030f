"""Programs of torch.export in processes that know nothing of the models."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from onnx_cases import images as images_of
from swin_references import our_model

from fastswin.export import program as program_module
from fastswin.export.program import compile_program, export_program, save_program

#: One map of 8x4 tokens, two windows: Triton's interpreter is slow.
SIZE = (32, 16)

ROOT = Path(__file__).parents[2]

RUN = """
import sys, torch
{imports}
run = {load}
for batch in (1, 3):
    x = torch.load(sys.argv[2])[:batch]
    torch.save(run(x), f"{{sys.argv[3]}}{{batch}}")
loaded = [m for m in sys.modules if m.split(".")[0] == "fastswin"]
assert not [m for m in loaded if m.split(".")[1:2] not in ([], ["ops"], ["_triton"])], loaded
{check}
"""


def run_elsewhere(tmp_path: Path, path: Path, **parts: str) -> dict[int, torch.Tensor]:
    """Logits at batches 1 and 3 from another process."""
    torch.save(images_of(3, SIZE), tmp_path / "x")
    code = RUN.format(**{"imports": "", "check": "", **parts})
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "x"), str(tmp_path / "y")],
        capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {batch: torch.load(tmp_path / f"y{batch}") for batch in (1, 3)}


def assert_is(model, outputs):
    with torch.no_grad():
        for batch, actual in outputs.items():
            torch.testing.assert_close(actual, model(images_of(3, SIZE)[:batch]), atol=1e-4, rtol=0)


@functools.cache
def model_of(version: int):
    return our_model(version, image_size=SIZE, depths=(2,), num_heads=(2,))


@functools.cache
def plain_program(version: int) -> torch.export.ExportedProgram:
    """Traced once: that takes seconds."""
    return export_program(model_of(version))


LOAD = "torch.export.load(sys.argv[1]).module()"
#: The operators alone: the package loads nothing else until it is asked for (RUN checks that).
ONLY_OPS = "import fastswin.ops.window_attention.register"


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_plain_program_runs_without_the_package(tmp_path, version):
    path = save_program(plain_program(version), tmp_path / "plain.pt2")
    outputs = run_elsewhere(tmp_path, path, load=LOAD, check="assert not loaded")
    assert_is(model_of(version), outputs)


@pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])
def test_registered_operator_survives_and_needs_its_registration_only(tmp_path, version):
    program = export_program(model_of(version), attention="fastswin")
    calls = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert calls.count("fastswin.window_attention_fwd.default") == 2
    path = save_program(program, tmp_path / "ops.pt2")
    assert_is(model_of(version), run_elsewhere(tmp_path, path, load=LOAD, imports=ONLY_OPS))


#: The compiler's time is that of headers: neither made ready for a second program, of which there
#: is none, nor tried out with vector instructions.
BRIEF_COMPILING = {"aot_inductor.precompile_headers": False, "cpp.vec_isa_ok": False}


def test_compiled_package_runs_without_the_package(tmp_path):
    with torch._inductor.config.patch(BRIEF_COMPILING):
        path = compile_program(plain_program(1), tmp_path / "compiled.pt2")
    load = "torch._inductor.aoti_load_package(sys.argv[1])"
    assert_is(model_of(1), run_elsewhere(tmp_path, path, load=load, check="assert not loaded"))


def test_compiling_without_a_compiler_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(program_module.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"AOTInductor needs a C\+\+ compiler"):
        compile_program(None, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "standard"}, "attention must be one of"),
        ({"precision": "int8"}, "precision must be one of"),
    ],
    ids=["attention", "precision"],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        export_program(our_model(depths=(1,), num_heads=(2,)), **arguments)


def test_file_name_says_what_it_is(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.pt2, got 'm\.onnx'"):
        save_program(None, tmp_path / "m.onnx")

"""Which backend "auto" takes, what an explicit one needs, and what the report says about it."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from backend_cases import AMX, AVX2, VNNI, runtime_engine
from engine_cases import cpu_engine, images_like, largest_difference, tiny

from fastswin.engine import Engine
from fastswin.engine.backends import BackendSelector
from fastswin.engine.backends.choose import auto_order
from fastswin.engine.backends.cpu import cpu_from_flags
from fastswin.engine.backends.onnxruntime import OnnxRuntime
from fastswin.engine.backends.openvino import OpenVino
from fastswin.engine.precision import find_precision
from fastswin.quant import calibrate

CPU = torch.device("cpu")


def small(version: int = 1):
    return tiny(version, depths=(1,), num_heads=(2,))


@pytest.fixture
def missing(monkeypatch):
    """Makes modules look as if they were not installed."""

    def hide(*modules: str) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name in modules else find(name)
        )

    return hide


ORDERS = [
    ("fp32", AVX2, ("openvino", "onnxruntime", "torch")),
    ("bf16", AMX, ("openvino", "onnxruntime", "torch")),
    ("int8", AMX, ("openvino", "onnxruntime")),
    ("int8", VNNI, ("openvino", "onnxruntime")),
    ("int8", AVX2, ("onnxruntime", "openvino")),
    ("int8_mode1", AMX, ("torch",)),
    ("fp8", AMX, ("torch",)),
    ("fp16", AMX, ("torch",)),
]


@pytest.mark.parametrize(("precision", "cpu", "order"), ORDERS)
def test_order(precision, cpu, order):
    assert auto_order(precision, cpu) == order


def selector(backend: str, precision: str, cpu=AVX2) -> BackendSelector:
    return BackendSelector(backend, CPU, find_precision(precision, CPU), "auto", cpu)


def test_bf16_is_computed_in_fp32_where_the_cpu_has_no_bf16():
    assert selector("auto", "bf16", AMX).choice.compute == "bf16"
    assert selector("auto", "bf16", AVX2).choice.compute == "fp32"
    assert "this CPU has no bf16 products" in selector("openvino", "bf16", AVX2).choice.reason
    assert selector("onnxruntime", "bf16", AMX).choice.compute == "fp32"


def test_the_reason_tells_of_shorter_weights():
    assert "about 7 bits" in selector("auto", "int8", AVX2).choice.reason
    assert "7 bits" not in selector("auto", "int8", VNNI).choice.reason


def test_auto_takes_the_first_and_says_so():
    model = small()
    engine = cpu_engine(model, backend="auto")
    report = engine.report()
    assert (report.backend.backend, report.backend.compute) == ("openvino", "fp32")
    images = images_like(model)
    with torch.no_grad():
        assert largest_difference(engine(images), model(images)) <= 1e-5
    assert "backend openvino, products in fp32: the fastest for fp32" in str(engine.report())
    assert "compiled: logits of 2 images of 36x52" in str(engine.report())
    values = json.loads(json.dumps(engine.report().to_dict()))
    assert values["backend"]["backend"] == "openvino"
    assert ["logits", 2, [36, 52]] in values["programs"]


def test_auto_is_the_default_and_fp16_stays_on_pytorch():
    assert Engine(small(), "fp32", device="cpu").report().backend.backend == "openvino"
    report = Engine(small(), device="cpu").report()
    assert (report.precision, report.backend.backend) == ("fp16", "torch")
    assert "'bf16' and 'fp32' are faster on CPUs" in str(report)


def test_auto_without_runtimes(missing):
    missing("openvino", "onnx")
    model = small()
    engine = cpu_engine(model, backend="auto")
    assert engine.report().backend.backend == "torch"
    for name in ("openvino", "onnxruntime"):
        assert f"pip install 'fastswin[{name}]'" in engine.report().backend.reason
    calibration = calibrate(model, images_like(model), "int8")
    with pytest.raises(
        ValueError, match=r"precision 'int8' on a CPU needs a runtime .*pip install"
    ):
        cpu_engine(model, "int8", backend="auto", calibration=calibration)


def wrong_answers(monkeypatch, runtime, by=0.01):
    compiled = runtime.compile

    def compile_wrongly(self, emitter, outputs):
        run = compiled(self, emitter, outputs)
        return lambda images: [array + by for array in run(images)]

    monkeypatch.setattr(runtime, "compile", compile_wrongly)


def test_auto_passes_over_a_wrong_answer(monkeypatch):
    wrong_answers(monkeypatch, OpenVino)
    model = small()
    engine = cpu_engine(model, backend="auto")
    choice = engine.report().backend
    assert choice.backend == "onnxruntime"
    assert "openvino: its answer is off by 0.01, more than" in choice.reason
    images = images_like(model)
    with torch.no_grad():
        assert largest_difference(engine(images), model(images)) <= 1e-5


def test_auto_ends_at_pytorch_and_int8_has_no_such_end(monkeypatch):
    def fail(self, emitter, outputs):
        raise RuntimeError("no such kernel\nand a long trace")

    # more than bf16 loses where the CPU multiplies in it (AVX-512 BF16)
    wrong_answers(monkeypatch, OpenVino, by=0.1)
    monkeypatch.setattr(OnnxRuntime, "compile", fail)
    model = small()
    engine = cpu_engine(model, "bf16", backend="auto")
    assert engine.report().backend.backend == "torch"
    assert "onnxruntime: it cannot run this model (no such kernel)" in str(engine.report())
    assert engine(images_like(model)).dtype == torch.bfloat16
    monkeypatch.setattr(OpenVino, "compile", fail)
    calibration = calibrate(model, images_like(model), "int8")
    with pytest.raises(ValueError, match="no backend runs precision 'int8' here"):
        cpu_engine(model, "int8", backend="auto", calibration=calibration)


def test_auto_int8_checks_against_the_integer_reference():
    model = small(2)
    images = images_like(model, 4)
    engine = cpu_engine(model, "int8", backend="auto", calibration=calibrate(model, images, "int8"))
    assert engine.report().backend.compute == "int8"
    with torch.no_grad():
        expected = model(images)
    assert largest_difference(engine(images), expected) <= 0.1 * expected.abs().max().item()


def test_a_choice_is_made_once(monkeypatch):
    engine = cpu_engine(small(), backend="auto")
    wrong_answers(monkeypatch, OpenVino)
    engine.refresh()
    assert engine.report().backend.backend == "openvino"


REFUSED = {
    "unknown": ({"backend": "tflite"}, "backend must be one of .* got 'tflite'"),
    "impl": (
        {"backend": "openvino", "impl": "reference"},
        "impl='reference' needs backend 'torch', got backend='openvino'",
    ),
    "fp16": ({"backend": "openvino", "precision": "fp16"}, "cannot run precision 'fp16'"),
    "mode1": (
        {"backend": "openvino", "precision": "int8_mode1"},
        "of the quantised precisions CPU runtimes serve 'int8'",
    ),
    "tf32": ({"backend": "openvino", "precision": "tf32"}, "'tf32' needs an NVIDIA GPU"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused_by_name(case):
    arguments, message = case
    with pytest.raises(ValueError, match=message):
        Engine(small(), **{"device": "cpu", "precision": "fp32", **arguments})


def test_a_runtime_that_is_missing_names_its_extra(missing):
    missing("openvino")
    with pytest.raises(ValueError, match=r"openvino is not installed: pip install 'fastswin\[open"):
        runtime_engine(small(), "openvino")


def test_a_calibration_needs_a_quantised_precision():
    model = small()
    calibration = calibrate(model, images_like(model), "int8")
    with pytest.raises(ValueError, match=r"calibration is for quantised .*'int8', .*got .*'fp32'"):
        cpu_engine(model, "fp32", calibration=calibration)


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
def test_a_runtime_is_for_cpus(backend):
    precision = find_precision("fp32", CPU)
    with pytest.raises(ValueError, match=f"backend='{backend}' runs on CPUs, the engine is on cud"):
        BackendSelector(backend, torch.device("cuda", 0), precision, "auto")
    assert not BackendSelector("auto", torch.device("cuda", 0), precision, "auto").graph


FLAGS = {
    "milan": ({"avx2", "fma"}, "x86_64", AVX2),
    "cascade-lake": ({"avx2", "avx512_vnni"}, "x86_64", VNNI),
    "alder-lake": ({"avx2", "avx_vnni"}, "AMD64", VNNI),
    "sapphire-rapids": ({"avx512_vnni", "amx_bf16", "amx_int8"}, "x86_64", AMX),
    "graviton3": ({"asimddp", "bf16", "i8mm"}, "aarch64", AMX),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS.values(), ids=FLAGS.keys())
def test_instructions(case):
    flags, machine, expected = case
    assert cpu_from_flags(frozenset(flags), machine) == expected


def test_an_arm_cpu_without_dot_products_does_not_saturate():
    cpu = cpu_from_flags(frozenset({"asimd"}), "aarch64")
    assert (cpu.dot8, cpu.saturating) == (False, False)

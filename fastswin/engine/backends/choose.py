"""Which runtime serves an engine on a CPU, and why.

    fp32    openvino, onnxruntime, torch
    bf16    openvino, onnxruntime, torch; in fp32 where the CPU has no bf16 products
    int8    openvino, onnxruntime where the CPU adds four 8-bit products at once (VNNI, AMX, ARM);
            onnxruntime, openvino elsewhere, where OpenVINO's int8 is no faster than its fp32
    fp16    torch alone: CPUs without fp16 products would convert at every step
    others  (int8_mode1, int8_mode2, fp8) torch alone, on the reference operators: right, not fast

"auto" takes the first of its row that is installed, that compiles the model, and whose answer to
one random image is right. What was passed over stays in the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from fastswin.engine.backends.cpu import Cpu, this_cpu
from fastswin.engine.backends.runner import GraphRunner
from fastswin.engine.precision import Precision

Backend = Literal["auto", "openvino", "onnxruntime", "torch"]
BACKENDS: tuple[str, ...] = get_args(Backend)

#: Modules that a backend imports, and the extra that installs them.
NEEDS = {"openvino": ("openvino",), "onnxruntime": ("onnxruntime", "onnx"), "torch": ()}

#: Largest error of the check, relative to the largest logit: rounding in fp32; in bf16 and int8 a
#: bound that a wrong graph misses and rounding does not (bench/correctness.py has the fine gates).
CHECK_BOUNDS = {"fp32": 1e-4, "bf16": 8e-2, "int8": 0.25}

CHECK_SEED = 20

#: Quantised precisions whose stored outputs or format CPU runtimes have no fast form of.
TORCH_ALONE = ("int8_mode1", "int8_mode2", "fp8")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        backend: "openvino", "onnxruntime" or "torch".
        compute: "fp32", "bf16" or "int8" products; torch: the precision's own.
        reason: for people, one line.
    """

    backend: str
    compute: str
    reason: str


def auto_order(precision: str, cpu: Cpu) -> tuple[str, ...]:
    """Backends for a precision, the fastest first."""
    if precision == "fp16" or precision in TORCH_ALONE:
        return ("torch",)
    if precision == "int8":
        return ("openvino", "onnxruntime") if cpu.dot8 else ("onnxruntime", "openvino")
    return "openvino", "onnxruntime", "torch"


def why_not_backend(name: str, precision: str) -> str | None:
    """None where a backend serves a precision in this installation, else the reason."""
    for module in NEEDS[name]:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'fastswin[{name}]'"
    if name != "torch" and precision in TORCH_ALONE:
        return "of the quantised precisions CPU runtimes serve 'int8'; use that one or 'torch'"
    if name != "torch" and precision == "fp16":
        return "CPUs compute in fp32, bf16 or int8; use one of those precisions"
    return None


class BackendSelector:
    """Chooses once, and opens the chosen runtime whenever weights are loaded.

    Args:
        backend: "auto" or a name.
        device: of the engine.
        precision: of the engine.
        impl: of the engine; anything but "auto" means PyTorch.
        cpu: instructions; None reads this machine's.

    Raises:
        ValueError: an unknown backend, one that cannot serve the precision, or none that can.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        precision: Precision,
        impl: str,
        cpu: Cpu | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.precision, self.impl, self.cpu = precision, impl, cpu or this_cpu()
        self._settled = backend != "auto"
        self.passed_over: list[str] = []
        if device.type != "cpu":
            if backend not in ("auto", "torch"):
                raise ValueError(f"backend={backend!r} runs on CPUs, the engine is on {device}")
            self.names: tuple[str, ...] = ("torch",)
            self.why = "backends are for CPUs"
        elif impl != "auto":
            if backend not in ("auto", "torch"):
                raise ValueError(f"impl={impl!r} needs backend 'torch', got backend={backend!r}")
            self.names, self.why = ("torch",), f"impl={impl!r}"
            self._refuse("torch")
        elif backend != "auto":
            self.names, self.why = (backend,), "asked for"
            self._refuse(backend)
        else:
            self.names, self.why = self._usable(), ""
        self.choice = self._choice(self.names[0])

    @property
    def graph(self) -> bool:
        """Whether a runtime other than PyTorch is to run the model."""
        return bool(self.names) and self.names[0] != "torch"

    def _refuse(self, name: str) -> None:
        if reason := why_not_backend(name, self.precision.name):
            raise ValueError(
                f"backend {name!r} cannot run precision {self.precision.name!r}: {reason}"
            )

    def _usable(self) -> tuple[str, ...]:
        usable = []
        for name in auto_order(self.precision.name, self.cpu):
            if reason := why_not_backend(name, self.precision.name):
                self.passed_over.append(f"{name}: {reason}")
            else:
                usable.append(name)
        if not usable:
            raise ValueError(
                f"precision {self.precision.name!r} on a CPU needs a runtime "
                f"({'; '.join(self.passed_over)})"
            )
        return tuple(usable)

    def _choice(self, name: str) -> Choice:
        precision = self.precision.name
        why = self.why or f"the fastest for {precision} on this CPU of those installed"
        compute = precision
        if name != "torch" and precision == "bf16" and not (self.cpu.bf16 and name == "openvino"):
            compute = "fp32"
            why += ", computing in fp32: " + (
                "ONNX Runtime has no bf16 kernels for CPUs"
                if self.cpu.bf16
                else "this CPU has no bf16 products"
            )
        if precision == "int8" and name != "torch" and self.cpu.saturating:
            why += "; weights in about 7 bits, since this CPU adds 8-bit products in 16 bits"
        if name == "torch" and precision == "fp16" and not self.why:
            why = "fp16 has no CPU runtime; 'bf16' and 'fp32' are faster on CPUs"
        if name == "torch" and self.precision.quantized and self.impl != "triton":
            why += "; 8-bit products on the reference operators, right but not fast"
        return Choice(name, compute, "; ".join([why, *self.passed_over]))

    def runtime(self, name: str) -> Any:
        """The runtime's compiler, for as many threads as PyTorch uses."""
        threads = torch.get_num_threads()
        if name == "openvino":
            from fastswin.engine.backends.openvino import OpenVino

            bf16 = self._choice(name).compute == "bf16"
            return OpenVino(threads, bf16=bf16, saturating=self.cpu.saturating)
        from fastswin.engine.backends.onnxruntime import OnnxRuntime

        return OnnxRuntime(threads, saturating=self.cpu.saturating)

    def open(
        self,
        make_runner: Callable[[Any], GraphRunner],
        expected: Callable[[torch.Tensor], torch.Tensor],
        finite: bool,
    ) -> GraphRunner | None:
        """A runner on the chosen backend; the first call settles what "auto" means.

        Args:
            make_runner: a runtime to a runner with the present weights.
            expected: right logits of an image ``[1, channels, h, w]``, by PyTorch.
            finite: whether all weights are.

        Returns:
            The runner, or None where PyTorch is to run the model.

        Raises:
            ValueError: "auto" found no runtime that runs int8 rightly.
        """
        if self.graph and not finite:
            self.choice = Choice("torch", "fp32", "the weights hold NaN or infinity: PyTorch")
            return None
        while self.graph:
            name = self.names[0]
            self.choice = self._choice(name)
            if self._settled:
                return make_runner(self.runtime(name))
            runner, problem = self._try(name, make_runner, expected)
            if problem is None:
                self.names, self._settled = (name,), True
                return runner
            self.passed_over.append(f"{name}: {problem}")
            self.names = self.names[1:]
            if not self.names:
                raise ValueError(
                    f"no backend runs precision {self.precision.name!r} here "
                    f"({'; '.join(self.passed_over)})"
                )
        self.choice = self._choice("torch")
        return None

    def _try(
        self,
        name: str,
        make_runner: Callable[[Any], GraphRunner],
        expected: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[GraphRunner | None, str | None]:
        """A runner and None, or None and what is wrong with it."""
        try:
            runner = make_runner(self.runtime(name))
            config = runner.config
            generator = torch.Generator().manual_seed(CHECK_SEED)
            image = torch.randn(1, config.in_channels, *config.image_size, generator=generator)
            logits = runner("logits", image)[0].float()
        except Exception as error:  # whatever a runtime raises, the next one may do better
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return None, f"it cannot run this model ({lines[0][:200]})"
        right = expected(image).float()
        if not bool(right.isfinite().all()):  # PyTorch alone is sure to carry every NaN through
            return None, "this model's answers are not finite"
        error_size = (logits - right).abs().max().item()
        bound = CHECK_BOUNDS[self._choice(name).compute]
        if self.precision.half:  # the answer itself is rounded, half a step at most
            bound += torch.finfo(self.precision.dtype).eps
        bound *= max(right.abs().max().item(), 1.0)
        if not error_size <= bound:
            return None, f"its answer is off by {error_size:.2g}, more than {bound:.2g}"
        return runner, None

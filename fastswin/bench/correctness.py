"""No speed without the right answer.

Logits on distinct images against the fp32 eager model of the source framework on the same device,
both given the same images (rounded to the contender's dtype):

    fp32         max |error| <= 1e-4
    tf32         max |error| <= 5e-3
    fp16, bf16   max |error| and relative RMS <= 1.5 x those of the eager model in that dtype
    int8, fp8    both <= 1.5 x those of the integer reference (quant/convert.py), on a CPU 3 x:
                 twice for weights in 7 bits, where its products leave no more

and top-1 agreement of at least 99.5 % (100 % in fp32 and tf32) among the images that are decided:
where the two largest reference logits lie within twice the allowed error, rounding alone may swap
them, in the eager model too.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import torch

from fastswin.bench.calibration import integer_reference
from fastswin.bench.contenders import Contender, model_for
from fastswin.bench.precision import fp32_scope
from fastswin.bench.problems import Problem, seeded_images
from fastswin.bench.source import Source

ABSOLUTE_GATES = {"fp32": 1e-4, "tf32": 5e-3}
RELATIVE_GATE = 1.5
CPU_INT8_GATE = 3.0
MIN_TOP1 = {"fp32": 1.0, "tf32": 1.0}
MIN_TOP1_BELOW_FP32 = 0.995

#: Gate, in units of the largest logit, where the eager model itself is not finite.
FALLBACK_GATE = {"fp16": 1e-2, "bf16": 8e-2}

MIN_CHECK_IMAGES = 8
CHECK_SEED = 1234

#: Images per call of the references, so that they fit in memory whatever the batch.
REFERENCE_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Gate:
    """Right answers for one problem, and how far from them is still right.

    Attributes:
        images: ``[n, channels, h, w]`` in the problem's dtype, n a multiple of the batch.
        reference: fp32 logits ``[n, classes]``.
        max_abs: largest allowed absolute error.
        rel_rms: largest allowed relative RMS error, None where only ``max_abs`` counts.
        min_top1: smallest allowed top-1 agreement among decided images.
    """

    images: torch.Tensor
    reference: torch.Tensor
    max_abs: float
    rel_rms: float | None
    min_top1: float


@dataclasses.dataclass(frozen=True)
class Check:
    """What one contender answered.

    Attributes:
        max_abs_err, rel_rms_err: against the reference; NaN where the answer is not finite.
        top1: agreement among decided images, 1 where none is decided.
        decided: number of decided images.
        failure: None where the check is green, else the reason in one line.
    """

    max_abs_err: float
    rel_rms_err: float
    top1: float
    decided: int
    failure: str | None


def make_gate(source: Source, problem: Problem, device: torch.device) -> Gate:
    """Run the references: fp32 eager, and eager in the problem's dtype.

    Args:
        source: the model.
        problem: precision and batch.
        device: where the contenders run.
    """
    batches = -(-max(problem.batch, MIN_CHECK_IMAGES) // problem.batch)
    images = seeded_images(problem, batches * problem.batch, device, CHECK_SEED)
    exact = Problem(problem.model, "fp32", problem.batch, problem.config, problem.checkpoint)
    reference = _eager_logits(source, exact, images.float())
    if problem.quantized:
        quantized = integer_reference(source, problem, device)
        with fp32_scope(tf32=False):
            answers = [quantized(part.float()) for part in images.split(REFERENCE_BATCH)]
        error, rms = _errors(torch.cat(answers), reference)
        factor = RELATIVE_GATE if device.type == "cuda" else CPU_INT8_GATE
        max_abs, rel_rms = factor * error, factor * rms
    elif problem.dtype in ABSOLUTE_GATES:
        max_abs, rel_rms = ABSOLUTE_GATES[problem.dtype], None
    else:
        error, rms = _errors(_eager_logits(source, problem, images), reference)
        finite = error == error and error != float("inf")
        if not finite:
            error = FALLBACK_GATE[problem.dtype] * reference.abs().max().item() / RELATIVE_GATE
        max_abs = RELATIVE_GATE * error
        rel_rms = RELATIVE_GATE * rms if finite else None
    min_top1 = MIN_TOP1.get(problem.dtype, MIN_TOP1_BELOW_FP32)
    return Gate(images, reference, max_abs, rel_rms, min_top1)


def check(contender: Contender, gate: Gate, batch: int) -> Check:
    """Run the gate's images through a contender, ``batch`` at a time, and judge every logit."""
    logits = torch.cat([contender.logits(images) for images in gate.images.split(batch)])
    return judge(logits, gate)


def judge(logits: torch.Tensor, gate: Gate) -> Check:
    """Compare logits ``[n, classes]`` with the gate's."""
    if logits.shape != gate.reference.shape:
        shapes = f"{tuple(logits.shape)}, not {tuple(gate.reference.shape)}"
        return Check(float("nan"), float("nan"), 0.0, 0, f"logits have shape {shapes}")
    error, rms = _errors(logits, gate.reference)
    best = gate.reference.topk(min(2, gate.reference.shape[1]), dim=1).values
    decided = best[:, 0] - best[:, -1] > 2 * gate.max_abs
    agree = (logits.argmax(1) == gate.reference.argmax(1))[decided]
    top1 = agree.float().mean().item() if decided.any() else 1.0
    reason = None
    if not bool(logits.isfinite().all()):
        reason = f"{int((~logits.isfinite()).sum())} logits are NaN or infinite"
    elif error > gate.max_abs:
        reason = f"max abs error {error:.3g} is over the gate {gate.max_abs:.3g}"
    elif gate.rel_rms is not None and rms > gate.rel_rms:
        reason = f"relative RMS error {rms:.3g} is over the gate {gate.rel_rms:.3g}"
    elif top1 < gate.min_top1:
        reason = f"top-1 agreement {top1:.2%} is under {gate.min_top1:.1%}"
    return Check(error, rms, top1, int(decided.sum()), reason)


def _errors(logits: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Largest absolute and relative RMS error."""
    difference = logits.double() - reference.double()
    rms = difference.square().mean().sqrt() / reference.double().square().mean().sqrt()
    return difference.abs().max().item(), rms.item()


def _eager_logits(source: Source, problem: Problem, images: torch.Tensor) -> torch.Tensor:
    model: Callable[[torch.Tensor], torch.Tensor] = model_for(source, problem, images.device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(fp32_scope(tf32=problem.tf32))
        return torch.cat([model(part).float() for part in images.split(REFERENCE_BATCH)])

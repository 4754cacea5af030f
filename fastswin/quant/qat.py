"""Training with quantisation in the loop, so that the weights learn to live with 8 bits.

    loss = (1 - a) * cross_entropy(student, labels) + a * T^2 * KL(teacher / T || student / T)

:class:`QatModel` runs a model with fake-quantised layers (fake_quant.py): activation ranges are
those of the calibration and stay fixed, weight scales follow the weights, gradients pass straight
through the rounding. The teacher is the model before quantisation. A live model of timm,
torchvision or Microsoft's style is trained through a readable twin that *shares its memory*: an
optimiser's in-place steps change both, and nothing has to be copied back.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from fastswin.models import SwinTransformer, config_of, official_state
from fastswin.quant.fake_quant import FakeQuant
from fastswin.quant.forward import run
from fastswin.quant.layers import quant_layers
from fastswin.quant.ranges import Calibration, build_ranges, fingerprint_of


class QatModel(nn.Module):
    """A model that trains as it will run in 8 bits.

    Args:
        module: the readable model, or a live one whose parameters it can share. It is trained in
            place; its training flag decides about dropout and drop path.
        calibration: ranges made for its present weights.

    Attributes:
        model: the readable model, or the twin that shares a live model's memory.

    Raises:
        QuantizationError: ranges of other weights.
        TypeError, ValueError: no Swin, or one whose parameters cannot be shared.
    """

    def __init__(self, module: nn.Module, calibration: Calibration) -> None:
        super().__init__()
        self.model = twin(module)
        calibration.check(self.model)
        self.calibration = calibration
        self._product = FakeQuant(calibration.layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float images ``[B, channels, h, w]`` to logits ``[B, classes]``."""
        return run(self.model, quant_layers(self.model), images, self._product, impl="auto")

    def finish(self) -> Calibration:
        """The calibration of the trained weights: the same activation ranges, new weight scales."""
        old = self.calibration
        activations = {name: (r.input_amax, r.output_amax) for name, r in old.layers.items()}
        return dataclasses.replace(
            old,
            layers=build_ranges(self.model, old.scheme, activations),
            model_fingerprint=fingerprint_of(self.model),
        )


def twin(module: nn.Module) -> SwinTransformer:
    """The readable model that shares every parameter's memory with a live one.

    Args:
        module: as for :func:`fastswin.models.from_live`; ours is returned as it is.

    Raises:
        TypeError: no Swin.
        ValueError: weights that the readable model holds in another form (Hugging Face's separate
            q, k and v), so that training it would not reach the module.
    """
    if isinstance(module, SwinTransformer):
        return module
    state = official_state(module)
    owned = {p.untyped_storage().data_ptr() for p in module.parameters()}
    foreign = [n for n, t in state.items() if t.untyped_storage().data_ptr() not in owned]
    if foreign:
        raise ValueError(
            f"module: {len(foreign)} weights such as {foreign[0]} cannot be shared with "
            f"{type(module).__name__}; train models.from_live(module) instead"
        )
    with torch.device("meta"):
        model = SwinTransformer(config_of(module))
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(True).train(module.training)


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor | None = None,
    *,
    temperature: float = 2.0,
    teacher_weight: float = 0.9,
) -> torch.Tensor:
    """The module's loss, a scalar in fp32.

    Args:
        logits: ``[B, classes]`` of the quantised model.
        teacher_logits: ``[B, classes]`` of the fp32 model; they get no gradient.
        labels: int64 ``[B]``; None trains on the teacher alone, so that any images serve.
        temperature: ``T``, softens both distributions.
        teacher_weight: ``a``, in [0, 1]; 1 where there are no labels.

    Raises:
        ValueError: a number out of its range.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if not 0.0 <= teacher_weight <= 1.0:
        raise ValueError(f"teacher_weight must lie in [0, 1], got {teacher_weight}")
    student = F.log_softmax(logits.float() / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits.detach().float() / temperature, dim=1)
    divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    distilled = temperature**2 * divergence
    if labels is None:
        return distilled
    return (1 - teacher_weight) * F.cross_entropy(logits.float(), labels) + (
        teacher_weight * distilled
    )

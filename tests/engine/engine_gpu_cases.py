"""Small models, their images, engines without graphs, and their check, for tests on a GPU."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import images_like, tiny

from fastswin.engine import Engine
from fastswin.engine.precision import PRECISIONS
from fastswin.models import SwinTransformer
from fastswin.models.variants import find_variant

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])


SMALL = {"image_size": (56, 84), "window_size": 7}


def small(version=1):
    return tiny(version, **SMALL)


def eager_of(model, precision="fp16"):
    """The same engine without graphs; ladders of one batch size give it the same plan."""
    return Engine(model, precision, cuda_graphs=False)


def cuda_images(model, batch, size=None, seed=0):
    return (images_like(model, batch, size) + 0.1 * seed).cuda()


@torch.no_grad()
def check_named_model(name: str, batch: int, precision: str, planned: Callable[[Any], Any]) -> None:
    """A variant with two blocks a stage, in a graph and not: against fp64, three runs bitwise.

    Args:
        name: of the variant.
        batch: a rung of the ladder, so that graph and plain calls have one plan.
        precision: "fp16" or "bf16".
        planned: whether a plan has what is to be tested; skipped where no plan can have it.
    """
    device = torch.device("cuda")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels need compute capability 9.0")
    torch.manual_seed(5)
    model = SwinTransformer(dataclasses.replace(find_variant(name), depths=(2, 2, 2, 2)))
    model = model.eval().to(device)
    for parameter in model.parameters():  # V2's norms begin at 0
        parameter.add_(0.05 * torch.randn_like(parameter))
    images = images_like(model, batch).to(device)
    dtype = PRECISIONS[precision].dtype
    engine = Engine(model, precision)
    assert planned(engine.report(batch).plan)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model).to(dtype)
    truth = exact(images.double())
    most = 2 * (eager(images.to(dtype)).double() - truth).abs().max()
    logits = engine(images.to(dtype)).clone()
    assert (logits.double() - truth).abs().max() <= most
    plain = eager_of(model, precision)
    for _ in range(3):
        assert torch.equal(engine(images.to(dtype)), logits)
        assert torch.equal(plain(images.to(dtype)), logits)

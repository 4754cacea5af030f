"""A small model, its images and its engine without graphs, for tests on a GPU."""

from __future__ import annotations

import pytest
from engine_cases import images_like, tiny

from fastswin.engine import Engine

VERSIONS = pytest.mark.parametrize("version", [1, 2], ids=["v1", "v2"])


SMALL = {"image_size": (56, 84), "window_size": 7}


def small(version=1):
    return tiny(version, **SMALL)


def eager_of(model, precision="fp16"):
    """The same engine without graphs; ladders of one batch size give it the same plan."""
    return Engine(model, precision, cuda_graphs=False)


def cuda_images(model, batch, size=None, seed=0):
    return (images_like(model, batch, size) + 0.1 * seed).cuda()

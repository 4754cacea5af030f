"""What builds a contender returns, apart from contenders.py so that several files can build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Built:
    """A way to run the model, ready to call.

    Attributes:
        forward: images ``[B, channels, h, w]`` to logits, which the next call may overwrite.
        graph: whether it replays CUDA graphs.
        keep: whatever must outlive ``forward``.
        notes: fields for the record, such as the runtime's version.
    """

    forward: Forward
    graph: bool = False
    keep: object = None
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

"""What decides about the forms of one stage, and what has been decided of it so far."""

from __future__ import annotations

import dataclasses
import math

from fastswin.engine.small_batch import LayerTiles

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class StageShape:
    """A stage of one batch, as kernels see it.

    Attributes:
        version: of Swin, 1 or 2.
        M: rows of the stage: tokens of all images.
        C, num_heads, hidden: channels, heads, and hidden units of the MLP.
        window_size, map_size: height and width in tokens.
        windows: of the batch.
        multiprocessors: of the GPU.
    """

    version: int
    M: int
    C: int
    num_heads: int
    hidden: int
    window_size: Pair
    map_size: Pair
    windows: int
    multiprocessors: int

    @property
    def key(self) -> Pair:
        """Version and channels, by which tables of forms are kept."""
        return self.version, self.C

    @property
    def tokens(self) -> int:
        """Of one window."""
        return math.prod(self.window_size)


@dataclasses.dataclass
class Choice:
    """What has been chosen of a stage so far: words (plan.py), reasons and tiles by layer."""

    words: dict[str, str]
    reasons: dict[str, str]
    launch: dict[str, LayerTiles] = dataclasses.field(default_factory=dict)
    few_rows: bool = False
    split: bool = False
    split_attention: bool = False
    ahead: bool = False
    post_norm: tuple[str, ...] | None = None

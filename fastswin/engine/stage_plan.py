"""A plan as data: one stage's geometry, forms and tiles, and a whole forward pass of them.

The words of the forms, and who chooses them, are in plan.py.
"""

from __future__ import annotations

import dataclasses

from fastswin.engine.quantized.formats import StageFormats
from fastswin.engine.small_batch import LayerTiles
from fastswin.ops.linear.api import InputPrecision
from fastswin.ops.linear.config import OneShotConfig

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage: geometry, chosen implementations, and why a faster one does not apply.

    ``launch`` holds tuned tiles by layer; what it lacks takes its operator's heuristic. ``formats``
    says which layers of a quantised engine multiply in 8 bits; the words are those of the others.
    ``norm2`` says where V1's second LayerNorm stands when mlp is "split-k" and proj one-shot:
    "apart", or "behind" fc1's product. ``split`` says that fp32 products, the library's by their
    words, are three of TF32, ``split_attention`` the same of attention's (tf32.py). ``few_rows``
    says that small_batch.py has built the stage, where no tuning table is asked. ``ahead`` launches
    LayerNorm and the Hopper product behind it programmatically. ``post_norm`` are the layers, of
    proj and fc2, whose product has V2's norm behind it in its kernel (cluster_stage.py).
    ``compact_bias`` says that attention reads compact tables (ops/window_attention/packing.py).
    """

    stage: int
    map_size: Pair
    window_size: Pair
    shift_size: Pair
    channels: int
    num_heads: int
    depth: int
    qkv: str
    attention: str
    proj: str
    mlp: str
    merge: str | None
    reasons: dict[str, str]
    launch: dict[str, LayerTiles] = dataclasses.field(default_factory=dict)
    formats: StageFormats | None = None
    pdl: bool = False
    norm2: str = "apart"
    split: bool = False
    split_attention: bool = False
    few_rows: bool = False
    ahead: bool = False
    post_norm: tuple[str, ...] = ()
    compact_bias: bool = False

    def endings(self, block: int) -> tuple[str, str]:
        """The words for proj and mlp of one block: "quantized" where its last product is."""
        if self.formats is None:
            return self.proj, self.mlp
        return self.formats.blocks[block].endings(self.proj, self.mlp)


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """A whole forward pass for one batch and image size.

    ``embed_products`` says of what the patch embedding's fp32 product is made (tf32.py),
    ``head_tiles`` are those of a head that is ours; None leaves them to the operator.
    ``ends_ahead`` says that pool and head are launched ahead.
    """

    batch: int
    image_size: Pair
    embed: str
    stages: tuple[StagePlan, ...]
    pool: str
    head: str = "library"
    pdl: bool = False
    embed_products: InputPrecision | None = None
    head_tiles: OneShotConfig | None = None
    ends_ahead: bool = False

"""Stages whose MLP half is one kernel past whose rows weights stream (ops/streamed_mlp).

In the plan's words mlp "fused" with a ``StreamedMlpConfig``. It adds the bias that proj has left to
its reader, so it stands behind the library's proj as well. Compute capability 9.0, half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastswin.engine.stage_shape import Choice, StageShape
from fastswin.ops.streamed_mlp.config import default_streamed_mlp_config, gluon_blocker

Pair = tuple[int, int]

#: By (version of Swin, channels of the stage): fewest and most rows of a batch.
StreamedMlps = Mapping[tuple[int, int], Pair]

#: The engine's: Swin-T takes 2 % less time at 32, L 1.5 at 8 and 5 at 32, SwinV2-B with windows of
#: 8 2 at 32; more rows of 128 channels are faster by the resident kernel, fewer of 256 by parts
#: (Swin-B at 8 2.7 % slower; docs/performance.md).
STREAMED_MLPS: StreamedMlps = {
    (1, 128): (6000, 33_000),
    (1, 192): (6000, 1 << 30),
    (1, 256): (16_000, 1 << 30),
    (2, 128): (6000, 33_000),
    (2, 192): (6000, 1 << 30),
    (2, 256): (16_000, 1 << 30),
}


def choose_streamed_mlp(table: StreamedMlps, shape: StageShape, chosen: Choice) -> None:
    """Change one stage's words and tiles where the table and the kernel take its MLP half.

    Args:
        table: fewest and most rows by version and channels.
        shape: the stage's.
        chosen: what has been chosen of it, changed in place.
    """
    M = shape.M
    fewest, most = table.get(shape.key, (1, 0))
    if not fewest <= M <= most or chosen.words["mlp"] in ("inside", "clusters"):
        return
    tiles = default_streamed_mlp_config(M, shape.hidden, shape.C, shape.multiprocessors)
    if tiles is None:
        why = f"programs of {M} rows would leave too much of the card idle"
        chosen.reasons["streamed_mlp"] = why
        return
    if blocker := gluon_blocker():
        chosen.reasons["streamed_mlp"] = blocker
        return
    for layer in ("fc1", "fc2"):
        chosen.launch.pop(layer, None)
    chosen.launch["mlp"], chosen.words["mlp"] = tiles, "fused"
    together = "" if tiles.programs == 1 else ", two programs share hidden units"
    chosen.reasons["mlp"] = f"{M} rows: {tiles.rows} stay while weights stream past{together}"

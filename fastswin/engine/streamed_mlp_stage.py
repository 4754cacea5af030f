"""Stages whose MLP half is one kernel past whose rows weights stream (ops/streamed_mlp).

In the plan's words mlp "fused" with a ``StreamedMlpConfig``. It adds the bias that proj has left to
its reader, so it stands behind the library's proj as well. Compute capability 9.0, half precision.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastswin.engine.small_batch import LayerTiles
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


def choose_streamed_mlp(
    table: StreamedMlps,
    choice: dict[str, str],
    reasons: dict[str, str],
    launch: dict[str, LayerTiles],
    *,
    version: int,
    M: int,
    C: int,
    hidden: int,
    multiprocessors: int,
) -> bool:
    """Change one stage's words and tiles where the table and the kernel take its MLP half.

    Args:
        table: fewest and most rows by version and channels.
        choice, reasons, launch: the stage's, changed in place.
        version: of Swin.
        M: rows of the stage, ``C`` channels, ``hidden`` of the MLP.
        multiprocessors: of the GPU.

    Returns:
        Whether the MLP half is such a kernel.
    """
    fewest, most = table.get((version, C), (1, 0))
    if not fewest <= M <= most or choice["mlp"] in ("inside", "clusters"):
        return False
    tiles = default_streamed_mlp_config(M, hidden, C, multiprocessors)
    if tiles is None:
        reasons["streamed_mlp"] = f"programs of {M} rows would leave too much of the card idle"
        return False
    if blocker := gluon_blocker():
        reasons["streamed_mlp"] = blocker
        return False
    for layer in ("fc1", "fc2"):
        launch.pop(layer, None)
    launch["mlp"], choice["mlp"] = tiles, "fused"
    together = "" if tiles.programs == 1 else ", two programs share hidden units"
    reasons["mlp"] = f"{M} rows: {tiles.rows} stay while weights stream past{together}"
    return True

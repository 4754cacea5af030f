"""Window attention backward for long windows, in tiles, from the saved statistics of each row.

    P = exp2(S - max) / sum     delta = rowsum(dO * O) = rowsum(P * dP)     dS = P * (dP - delta)

Three kernels, a file each, of which each holds one tile and walks over the others:

    dq      a tile of queries walks over the keys; also writes delta, and V2's temperature gradient
    dkv     a tile of keys walks over the queries, on transposed scores, so that P^T and dS^T are
            left operands without a transposition
    dbias   a tile of (queries, keys) walks over a run of windows and adds dS in registers

dkv can take dbias along (``fused``): its programs then walk over a run of windows and hold dS of
their keys for all queries; that fits up to about 144 tokens and saves two of nine products.
Tiles are exact: ``walked`` keys at a time, then a ``tail`` (144 = 4 * 32 + 16).
"""

from __future__ import annotations

from fastswin.ops.window_attention.backward_config import TiledBackwardConfig
from fastswin.ops.window_attention.backward_problem import BackwardProblem, Partials


def launch_tiles(problem: BackwardProblem, config: TiledBackwardConfig) -> Partials:
    """Launch; gradients of q, k, v are in the problem's tensors afterwards."""
    from fastswin.ops.window_attention.backward_dbias import launch_dbias
    from fastswin.ops.window_attention.backward_dkv import launch_dkv
    from fastswin.ops.window_attention.backward_dq import launch_dq

    needs = problem.needs
    delta, dscale = launch_dq(problem, config.dq)
    fused = needs.bias and config.dbias is None
    dpad = problem.new_padding_gradient()
    dbias = launch_dkv(problem, config, delta, dpad, fused)
    if needs.bias and not fused:
        dbias = launch_dbias(problem, config, delta)
    return Partials(dbias, dscale, dpad if needs.pad else None)

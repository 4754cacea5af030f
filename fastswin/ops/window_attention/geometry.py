"""Windows as index arithmetic: what roll, pad and partition would do, and the shift mask.

A map ``[H, W]`` is padded at the bottom and right to multiples of the window ``(Wh, Ww)``, then
rolled up and left by ``(Sh, Sw)``, then cut into ``nWh * nWw`` windows of ``N = Wh * Ww`` tokens,
row by row. Window ``(i, j)``, token ``(y, x)`` is therefore the padded map's token

    row = (i * Wh + y + Sh) mod (nWh * Wh)        col = (j * Ww + x + Sw) mod (nWw * Ww)

After the roll only the last row of windows and the last column of windows hold tokens from two
ends of the map, split at ``Wh - Sh`` and ``Ww - Sw``. Tokens on different sides of a split get an
additive -100. So there are four kinds of window whatever the size of the map:

    kind = 2 * (last row of windows) + (last column of windows)

which is why the kernel reads one ``[4, nH, N, N]`` table of bias + mask and computes no mask.
Source: Liu et al. 2021, section 3.2, figure 4; padding order as in torchvision.
"""

from __future__ import annotations

import torch

from fastswin._triton.tiles import cdiv

Pair = tuple[int, int]

#: Additive mask between tokens of different regions, as every reference implementation has it.
SHIFT_MASK_FILL = -100.0


def num_windows(map_size: Pair, window_size: Pair) -> Pair:
    """Windows ``(nWh, nWw)`` that cover a map, the last ones padded; the map may be symbolic."""
    return cdiv(map_size[0], window_size[0]), cdiv(map_size[1], window_size[1])


def relative_position_index(window_size: Pair, device: torch.device | str = "cpu") -> torch.Tensor:
    """Row of the bias table for each (query, key) pair: int64 ``[N, N]``."""
    rows, cols = window_size
    y, x = _token_coords(window_size, device)
    coords = torch.stack((y, x))
    relative = coords[:, :, None] - coords[:, None, :]
    return (relative[0] + rows - 1) * (2 * cols - 1) + relative[1] + cols - 1


def expand_bias_table(bias_table: torch.Tensor, window_size: Pair) -> torch.Tensor:
    """``[(2 Wh - 1) * (2 Ww - 1), nH]`` table to the dense ``[nH, N, N]`` bias.

    Row ``(qy - ky + Wh - 1, qx - kx + Ww - 1)`` for query (qy, qx) and key (ky, kx): two sliding
    windows over the table, read backwards. Unlike a gather by index, its gradient is a plain sum
    without atomics, the same bits in every run.
    """
    rows, cols = window_size
    heads = bias_table.shape[1]
    table = bias_table.view(2 * rows - 1, 2 * cols - 1, heads)
    slid = table.unfold(0, rows, 1).unfold(1, cols, 1)  # [qy, qx, nH, Wh - 1 - ky, Ww - 1 - kx]
    dense = slid.permute(2, 0, 1, 3, 4).flip(3, 4)
    return dense.reshape(heads, rows * cols, rows * cols)


def _token_coords(
    window_size: Pair, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each token of a window, int64 ``[N]`` each."""
    y = torch.arange(window_size[0], device=device).repeat_interleave(window_size[1])
    x = torch.arange(window_size[1], device=device).repeat(window_size[0])
    return y, x


def window_kind_mask(
    window_size: Pair, shift_size: Pair, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Shift mask of the four kinds of window: fp32 ``[4, N, N]``, 0 or -100."""
    y, x = _token_coords(window_size, device)
    below = (y >= window_size[0] - shift_size[0]).int()
    right = (x >= window_size[1] - shift_size[1]).int()
    masks = []
    for kind in range(4):
        region = below * (kind // 2) * 2 + right * (kind % 2)
        masks.append((region[:, None] != region[None, :]).float() * SHIFT_MASK_FILL)
    return torch.stack(masks)


def window_kinds(
    map_size: Pair, window_size: Pair, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Kind of each window of a map: int64 ``[nWh * nWw]``."""
    rows, cols = num_windows(map_size, window_size)
    last_row = (torch.arange(rows, device=device) == rows - 1).long()
    last_col = (torch.arange(cols, device=device) == cols - 1).long()
    return (2 * last_row[:, None] + last_col[None, :]).flatten()


def shift_attention_mask(
    map_size: Pair, window_size: Pair, shift_size: Pair, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The reference's ``attn_mask``: fp32 ``[nW, N, N]``, 0 or -100."""
    masks = window_kind_mask(window_size, shift_size, device)
    return masks[window_kinds(map_size, window_size, device)]

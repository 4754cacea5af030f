"""Compile attention on compact and on dense tables for one GPU generation, as JSON lines.

A program of its own: Triton decides once per process whether kernels are interpreted. Tensors are
on the meta device, so real sizes cost no memory.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys
from unittest import mock

import torch

from fastswin.ops.window_attention import forward
from fastswin.ops.window_attention.config import padded_tokens
from fastswin.testing import aot

#: Multiprocessors of a card of each generation: A100, RTX 3090, L4, H100.
MULTIPROCESSORS = {80: 108, 86: 82, 89: 58, 90: 132}

#: Storage of tables. Half precision has "short" ones, or "wide" ones where 16 bits do not hold the
#: range of a head.
TABLES = {
    "dense": torch.float16, "short": torch.int16, "wide": torch.float32,
    "dense fp32": torch.float32, "fp32": torch.float32,
}  # fmt: skip

#: Window, whether it is shifted, table.
FORMS = [(w, s, t) for w in (16, 24) for s in (False, True) for t in ("dense", "short")]
FORMS += [(24, True, "wide"), (24, True, "dense fp32"), (24, True, "fp32")]


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launch(window: int, table: str, shifted: bool) -> aot.Launch:
    """A stage of four heads of SwinV2, one window or four."""
    heads, side, N = 4, window * (1 + shifted), window * window
    dtype = torch.float32 if "fp32" in table else torch.float16
    bias = empty(heads, window, (2 * window - 1) * window, dtype=TABLES[table])
    if "dense" in table:
        NP = padded_tokens(N)
        bias = empty(4 if shifted else 1, heads, NP, NP, dtype=TABLES[table])
    with aot.record_launches() as found:
        forward.window_attention_fwd(
            empty(1, side, side, 3 * 32 * heads, dtype=dtype), bias,
            empty(heads, dtype=torch.float32), None, 32**-0.5, heads, (window, window),
            (window // 2,) * 2 if shifted else (0, 0), False, pdl=True,
        )  # fmt: skip
    return found[0]


def reads(ptx: str) -> dict[str, int]:
    """Loads of global memory, into registers and into shared memory, by kind and width."""
    direct = re.findall(r"\bld\.global[.\w]*", ptx)
    copies = re.findall(r"\bcp\.async\.c[ag]\b.*?\], (0x[0-9a-f]+)", ptx)
    return dict(collections.Counter(direct + copies))


if __name__ == "__main__":
    target = int(sys.argv[1])
    answers = {
        "device_capability": divmod(target, 10), "multiprocessor_count": MULTIPROCESSORS[target]
    }  # fmt: skip
    with mock.patch.multiple(
        forward, **{name: mock.Mock(return_value=value) for name, value in answers.items()}
    ):
        for window, shifted, table in FORMS:
            one = launch(window, table, shifted)
            compiled = dataclasses.asdict(aot.compile_launch(one, target))
            key = aot.binary_identity(one), aot.SAME_CODE.get(target, target)
            form = {"window": window, "shifted": shifted, "table": table}
            print(
                json.dumps(compiled | form | {"reads": reads(aot._generated[key][0])}), flush=True
            )

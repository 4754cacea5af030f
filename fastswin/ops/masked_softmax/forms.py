"""Which kernel takes a problem, and how many programs share its rows and its loop axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fastswin.ops.masked_softmax.config import (
    MAX_PAIRED_ROW,
    PROGRAMS_PER_MULTIPROCESSOR,
    Direction,
    SoftmaxConfig,
    paired_config,
)
from fastswin.ops.masked_softmax.rows import RowPlan

Shape = tuple[int, ...]


class Operand(NamedTuple):
    """What of a tensor decides a launch."""

    shape: Shape
    strides: Shape
    itemsize: int
    aligned: bool


def choose_form(
    folded: RowPlan,
    operands: Mapping[str, Operand],
    keys: int,
    prefix: bool,
    direction: Direction,
    given: SoftmaxConfig | None,
    default: SoftmaxConfig,
) -> tuple[SoftmaxConfig, RowPlan]:
    """The config to launch and its rows: pairs where there are any, unless another form is given.

    Raises:
        ValueError: ``given`` wants pairs and two rows are no whole number of words.
    """
    config = given or default
    if config.long:
        flat = folded.without_loop()
        if flat is None:
            raise RuntimeError("the two-pass kernel needs a plan with a free row axis")
        return config, flat
    if given is None or given.paired:
        pairs = given or paired_config(keys, direction)
        plan = folded.fill_blocks(pairs.block_rows, multiple=2)
        reason = why_not_paired(plan, operands, keys, prefix)
        if reason is None:
            return pairs, plan
        if given is not None:
            raise ValueError(f"config.paired does not apply: {reason}")
    return config, folded.fill_blocks(config.block_rows)


def cut(plan: RowPlan, config: SoftmaxConfig, multiprocessors: int) -> tuple[int, int, int]:
    """Row blocks, loop steps per program and runs; programs are row blocks times runs."""
    if config.long:
        return plan.rows, 1, 1
    blocks = -(-plan.rows // config.block_rows)
    wanted = (config.programs_per_multiprocessor or PROGRAMS_PER_MULTIPROCESSOR) * multiprocessors
    runs = min(plan.loop, max(1, wanted // blocks))  # one program too many is a wave too many
    steps = -(-plan.loop // runs)
    if config.steps:
        steps = min(steps, config.steps)
    return blocks, steps, -(-plan.loop // steps)


def tiles(config: SoftmaxConfig, keys: int, vector: int) -> dict[str, object]:
    """Tile constants of the kernel that runs ``config`` on rows of ``keys``."""
    if config.long:
        return {"P": config.block_keys // vector, "V": vector, "KEPT": config.kept}
    if config.paired:
        return {
            "N": keys,
            "R": config.block_rows // 2,
            "L": config.block_keys,
            "CHUNKS": -(-keys // config.block_keys),
            "AHEAD": config.ahead,
        }
    return {
        "EVEN": keys % config.block_keys == 0,
        "R": config.block_rows,
        "L": config.block_keys,
        "CHUNKS": -(-keys // config.block_keys),
    }


def why_not_paired(
    plan: RowPlan, operands: Mapping[str, Operand], keys: int, prefix: bool
) -> str | None:
    """None where two rows are a whole number of aligned words in each operand, else the reason."""
    if keys % 2 == 0 or keys > MAX_PAIRED_ROW:
        return f"{keys} keys: the length must be odd and at most {MAX_PAIRED_ROW}"
    if prefix:
        return "causal rows and seq_lens take another kernel"
    if plan.rows % 2:
        return f"{plan.rows} rows are no whole number of pairs"
    rows = (keys * plan.sizes[1] * plan.sizes[2], keys * plan.sizes[2], keys)
    for name, operand in operands.items():
        loop, *steps = plan.strides[name]
        packed = all(n == 1 or s == r for n, s, r in zip(plan.sizes, steps, rows, strict=True))
        if operand.itemsize != 2 or not operand.aligned or operand.strides[-1] != 1:
            return f"{name} is not made of aligned half-precision rows"
        if not packed or (plan.loop > 1 and loop % 2):
            return f"the rows of {name} do not follow each other in memory"
    return None

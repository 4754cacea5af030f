"""Rows of a table: written from what a search found, read back as what is known.

Times are rounded where they are written, and a run goes on with the rounded ones, so that a run
that continues the table proposes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastswin.bench.tune_search import Found
from fastswin.bench.tune_units import kernel_of
from fastswin.tuning.document import Row, minor_version
from fastswin.tuning.layers import LayerProblem
from fastswin.tuning.problem import CONFIG_TYPES, KernelProblem, LaunchConfig, config_to_dict

Microseconds = dict[KernelProblem, float]


def rounded_us(latency_us: float) -> float:
    """A time as it is stored."""
    return round(latency_us, 3)


def row_of_tiles(
    problem: KernelProblem,
    config: LaunchConfig,
    found: Found,
    shared_bytes: int,
    version: str,
    verdict: str,
) -> Row:
    """The row of a launch's best tiles.

    Args:
        problem: the launch.
        config: its best tiles.
        found: times of the search.
        shared_bytes: shared memory of one program with ``config``.
        version: of the Triton that compiled it.
        verdict: before whole models are asked.
    """
    return {
        "op": problem.op,
        "dtype": problem.dtype,
        "triton": version,
        "shape": problem.dims,
        "rows": problem.rows,
        "config": config_to_dict(config),
        "shared_bytes": shared_bytes,
        "latency_us": rounded_us(found.latency_us),
        "default_us": None if found.default_us is None else rounded_us(found.default_us),
        "verdict": verdict,
    }


def row_of_form(
    layer: LayerProblem, latency_us: Mapping[str, float], version: str, verdict: str
) -> Row:
    """The row of a layer's fastest form.

    Args:
        layer: which.
        latency_us: of its forms, at least one.
        version: of the Triton that compiled their launches.
        verdict: before whole models are asked.
    """
    return {
        "layer": layer.layer,
        "dtype": layer.dtype,
        "triton": version,
        "shape": layer.dims,
        "rows": layer.rows,
        "choice": min(latency_us, key=lambda form: latency_us[form]),
        "latency_us": dict(latency_us),
        "verdict": verdict,
    }


def known_times(configs: Sequence[Row], version: str) -> tuple[Microseconds, Microseconds]:
    """What rows of tiles say: times of launches with their best tiles, and with the engine's own.

    Args:
        configs: rows of a table.
        version: of Triton; rows of others say nothing.
    """
    best_us: Microseconds = {}
    default_us: Microseconds = {}
    for row in configs:
        if minor_version(row["triton"]) == version and row["op"] in CONFIG_TYPES:
            key = kernel_of(row)
            best_us[key] = row["latency_us"]
            if row["default_us"] is not None:
                default_us[key] = row["default_us"]
    return best_us, default_us

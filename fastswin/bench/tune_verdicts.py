"""What whole models said of units, written into the rows of a table.

    row of tiles   the best verdict of the units that launch it, "none" where nobody proposed it
    row of forms   the verdict of its choice; a form that gained takes the place of one that did not
    models         heuristics and table in milliseconds, by model, batch and dtype

Models that the table knows from earlier runs keep their say: what they lost with does not answer,
what they gained with does unless these lost with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastswin.bench.tune_select import Comparison
from fastswin.bench.tune_units import Problem, Unit, is_default, kernel_of, layer_of
from fastswin.tuning.document import Row
from fastswin.tuning.layers import LayerProblem
from fastswin.tuning.merge import verdict_of
from fastswin.tuning.problem import KernelProblem


def write_verdicts(
    document: dict[str, Any],
    asked: Collection[Problem],
    verdicts: Mapping[Unit, str],
    comparisons: Sequence[Comparison],
    precision: str,
    version: str,
) -> None:
    """Change a table's rows in place.

    Args:
        document: the table.
        asked: launches and layers of this run; rows of others stay as they are.
        verdicts: of everything that was proposed.
        comparisons: of every model and batch.
        precision: of the models.
        version: of the Triton that ran them; rows of others stay as they are.
    """
    tiles: dict[KernelProblem, list[str]] = {}
    forms: dict[LayerProblem, dict[str, str]] = {}
    for unit, verdict in verdicts.items():
        for kernel in unit.kernels():
            tiles.setdefault(kernel, []).append(verdict)
        if isinstance(unit.problem, LayerProblem):
            forms.setdefault(unit.problem, {})[unit.form] = verdict
    now = {(c.model, c.batch, precision) for c in comparisons}
    earlier = {(m["model"], m["batch"], m["dtype"]) for m in document["models"]} - now

    def with_earlier(row: Row, verdict: str) -> str:
        kept = row["verdict"] in ("gain", "loss") and bool(earlier)
        return verdict_of([row["verdict"], verdict]) if kept else verdict

    for row in document["configs"]:
        if row["triton"] == version and kernel_of(row) in asked:
            verdict = with_earlier(row, verdict_of(tiles.get(kernel_of(row), ["none"])))
            row["verdict"] = "none" if is_default(row) else verdict
    for row in document["choices"]:
        if row["triton"] == version and layer_of(row) in asked:
            said = forms.get(layer_of(row), {})
            gained = [form for form, verdict in said.items() if verdict == "gain"]
            if gained and row["choice"] not in gained:
                row |= {"choice": gained[0], "verdict": "gain"}
            else:
                row["verdict"] = with_earlier(row, said.get(row["choice"], "none"))
    models = {(m["model"], m["batch"], m["dtype"]): m for m in document["models"]}
    for c in comparisons:
        models.pop((c.model, c.batch, precision), None)
        if c.heuristic_ms is not None and c.tuned_ms is not None:
            models[c.model, c.batch, precision] = {
                "model": c.model,
                "batch": c.batch,
                "dtype": precision,
                "triton": version,
                "heuristic_ms": round(c.heuristic_ms, 4),
                "tuned_ms": round(c.tuned_ms, 4),
                "units": c.units,
            }
    document["models"] = [models[key] for key in sorted(models)]

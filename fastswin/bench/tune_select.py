"""Which rows of a table stay: whole models decide, unit by unit and then together.

    1  every case (model, batch): each proposed unit alone beside the heuristics
    2  of each layer the unit that gained most, where no case lost with it
    3  every case with all that is kept of its layers: cases that lose give theirs up, and those
       that shared it are measured again

A case that the deadline cuts off leaves its units untried: they do not answer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

from fastswin.bench.failures import describe
from fastswin.bench.tune_units import Problem, Unit
from fastswin.bench.tune_whole import Measured

#: Least part of a model's time that a unit has to promise to be tried, and most units of a case.
LEAST_PROMISE, MAX_UNITS = 0.002, 6

#: A unit alone is dropped where a case gains less than this with it: the promise is met or missed
#: by far less than captures differ.
LEAST_UNIT_GAIN = -0.001

#: A case has to gain this with all its units; losing more than this it gives them up.
LEAST_GAIN, MOST_LOSS = 0.003, 0.004

#: Captures of each contender in the first comparison and in the last.
FIRST_CAPTURES, FINAL_CAPTURES = 3, 5

#: Rounds of final comparisons at most.
ROUNDS = 4

#: Part of the time that the first comparisons may take.
FIRST_SHARE = 0.65

#: A model and a batch.
Case = tuple[str, int]

#: Measures a case under sets of units: milliseconds of the heuristics, and each set beside them.
Measure = Callable[[Case, Sequence[tuple[Unit, ...]], int], tuple[float, list[Measured]]]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model and batch with the heuristics and with the table.

    Attributes:
        model, batch: the problem.
        heuristic_ms, tuned_ms: medians of one run; None with the reason in ``message``.
        max_abs_diff: largest difference between the two engines' logits.
        message: why there are no numbers, else empty.
        units: layers that the table changes.
    """

    model: str
    batch: int
    heuristic_ms: float | None
    tuned_ms: float | None
    max_abs_diff: float | None
    message: str = ""
    units: int = 0


@dataclasses.dataclass
class Proposal:
    """What a case could take: units with the microseconds they promise, and all its problems."""

    units: dict[Unit, float]
    problems: set[Problem]


class Selection:
    """Decides about units.

    Args:
        proposals: by case, in the order in which they are measured.
        measure: of whole models.
        deadline: of ``time.monotonic``.
        progress: receives a line per measurement.
    """

    def __init__(
        self,
        proposals: Mapping[Case, Proposal],
        measure: Measure,
        deadline: float,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.proposals, self.measure, self.progress = proposals, measure, progress
        now = time.monotonic()
        self._deadline = deadline
        self._first_deadline = now + FIRST_SHARE * (deadline - now)
        #: Gain of each unit alone, by case.
        self.alone: dict[Unit, dict[Case, float]] = {}
        #: Units that promise too little to be seen.
        self.slight: set[Unit] = set()
        #: Units that a case lost with, and those that no case gained with.
        self.lost: set[Unit] = set()
        self.useless: set[Unit] = set()
        self._found: dict[Case, Comparison] = {}
        #: Units with which each case was measured last.
        self._with: dict[Case, tuple[Unit, ...]] = {}

    def run(self) -> tuple[dict[Unit, str], list[Comparison]]:
        """Verdicts of all units that were proposed, and the comparison of every case."""
        for case, proposal in self.proposals.items():
            self._try_alone(case, proposal)
        for _ in range(ROUNDS):  # a case that gives units up changes those that share them
            kept = self.kept()
            for case in self.proposals:
                if self._with.get(case) != (units := self.chosen(case, kept)):
                    self._compare(case, units)
            if not self._give_up():
                break
        return self._verdicts(), [self._comparison(case) for case in self.proposals]

    def kept(self) -> dict[Problem, Unit]:
        """Of each layer the unit that gained most, among those that no case lost with."""
        best: dict[Problem, tuple[float, Unit]] = {}
        for unit, gains in self.alone.items():
            mean = sum(gains.values()) / len(gains)
            if (
                unit in self.lost | self.useless
                or min(gains.values()) < LEAST_UNIT_GAIN
                or mean <= 0
            ):
                continue
            if unit.problem not in best or mean > best[unit.problem][0]:
                best[unit.problem] = mean, unit
        return {problem: unit for problem, (_, unit) in best.items()}

    def chosen(self, case: Case, kept: Mapping[Problem, Unit]) -> tuple[Unit, ...]:
        """What a table with the kept units changes in a case, its own proposals or not."""
        problems = self.proposals[case].problems
        return tuple(unit for problem, unit in kept.items() if problem in problems)

    def _try_alone(self, case: Case, proposal: Proposal) -> None:
        if not proposal.units or time.monotonic() > self._first_deadline:
            return
        try:
            base_ms, _ = self.measure(case, [], 1)
            least_us = LEAST_PROMISE * base_ms * 1e3
            promising = [unit for unit, us in proposal.units.items() if us >= least_us]
            self.slight |= proposal.units.keys() - set(promising)
            tried = promising[:MAX_UNITS]
            if not tried:
                return
            _, found = self.measure(case, [(unit,) for unit in tried], FIRST_CAPTURES)
        except Exception as error:  # out of memory at one batch; the others are measured
            self.progress(f"{case[0]} batch {case[1]}: {describe(error).message}")
            return
        for unit, one in zip(tried, found, strict=True):
            gain = one.gain if math.isfinite(one.max_abs_diff) else -1.0
            self.alone.setdefault(unit, {})[case] = gain
            promise = proposal.units[unit] / (base_ms * 1e3)
            self.progress(
                f"{case[0]} batch {case[1]}: {unit}: {gain:+.2%} (promised {promise:+.2%})"
            )

    def _compare(self, case: Case, units: tuple[Unit, ...]) -> None:
        """Measure a case with units; nothing to measure where it has none."""
        self._with[case] = units
        before = self._found.get(case)
        if not units and before is not None and before.heuristic_ms is not None:
            base_ms = before.heuristic_ms
            self._found[case] = Comparison(*case, base_ms, base_ms, 0.0)
            return
        if time.monotonic() > self._deadline:
            self._found[case] = Comparison(*case, None, None, None, "the deadline is over")
            return
        try:
            base_ms, found = self.measure(
                case, [units] if units else [], FINAL_CAPTURES if units else 1
            )
        except Exception as error:
            self._found[case] = Comparison(*case, None, None, None, describe(error).message)
            return
        together = found[0] if units else Measured(base_ms, 0.0, 0.0)
        if not math.isfinite(together.max_abs_diff):
            together = Measured(base_ms, -0.5, math.inf)
        tuned_ms, difference = base_ms / (1 + together.gain), together.max_abs_diff
        self._found[case] = Comparison(*case, base_ms, tuned_ms, difference, units=len(units))
        self.progress(
            f"{case[0]} batch {case[1]}: {base_ms:.4f} ms, with {len(units)} layers of the table "
            f"{together.gain:+.2%}"
        )

    def _give_up(self) -> bool:
        """Drop units that a case lost with or that no case gained with; whether there were any."""
        before = len(self.lost | self.useless)
        users: dict[Unit, list[float | None]] = {}
        for case, units in self._with.items():
            gain = self._gain(case)
            for unit in units:
                users.setdefault(unit, []).append(gain)
            if gain is not None and gain < -MOST_LOSS:
                self.lost |= set(units)
        for unit, gains in users.items():
            if all(gain is not None and gain < LEAST_GAIN for gain in gains):
                self.useless.add(unit)
        return len(self.lost | self.useless) > before

    def _gain(self, case: Case) -> float | None:
        found = self._found.get(case)
        if found is None or found.heuristic_ms is None or found.tuned_ms is None:
            return None
        return found.heuristic_ms / found.tuned_ms - 1

    def _verdicts(self) -> dict[Unit, str]:
        kept = set(self.kept().values())
        units = [unit for proposal in self.proposals.values() for unit in proposal.units]
        return {unit: self._verdict(unit, kept) for unit in units}

    def _verdict(self, unit: Unit, kept: set[Unit]) -> str:
        alone = self.alone.get(unit, {})
        if unit in self.lost or any(gain < -MOST_LOSS for gain in alone.values()):
            return "loss"
        if unit not in kept:
            return "none" if alone or unit in self.slight else "untried"
        gains = [self._gain(case) for case, units in self._with.items() if unit in units]
        gained = any(gain is not None and gain >= LEAST_GAIN for gain in gains)
        return "gain" if gained else "untried"

    def _comparison(self, case: Case) -> Comparison:
        """What a case has with the rows that answer in the end."""
        found = self._found.get(case)
        if found is None:
            return Comparison(*case, None, None, None, "not measured")
        kept = set(self.kept().values())
        if any(self._verdict(unit, kept) != "gain" for unit in self._with[case]):
            return Comparison(*case, None, None, None, "some of its layers were not kept")
        return found

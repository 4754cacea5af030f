"""What a comparison of variants runs: models, a variants file, and waves of processes.

    models           T:8,32,V2T:8 or full names     -> problems, one for each model and batch
    variants file    VARIANTS, ONLY                 -> the variants of a problem, baseline first
    waves            jobs of a problem stay together, for their turns have to alternate

A variants file is Python that defines ``VARIANTS``, name -> function that changes the engine
(variants_patch.py) or None, and may define ``ONLY``, name -> models to which it is confined.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastswin.bench.problems import Problem, parse_names
from fastswin.models import list_models

#: Short names of models.
ALIASES = {
    "T": "swin_tiny_patch4_window7_224",
    "S": "swin_small_patch4_window7_224",
    "B": "swin_base_patch4_window7_224",
    "L": "swin_large_patch4_window7_224",
    "B384": "swin_base_patch4_window12_384",
    "L384": "swin_large_patch4_window12_384",
    "V2T": "swinv2_tiny_window8_256",
    "V2S": "swinv2_small_window8_256",
    "V2B8": "swinv2_base_window8_256",
    "V2T16": "swinv2_tiny_window16_256",
    "V2S16": "swinv2_small_window16_256",
    "V2B16": "swinv2_base_window16_256",
    "V2B24": "swinv2_base_window12to24_192to384",
    "V2L24": "swinv2_large_window12to24_192to384",
}

#: Name under which a variants file is imported.
_MODULE = "fastswin_variants_file"

Patch = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class VariantsFile:
    """What a variants file defines.

    Attributes:
        path: of the file; processes load it again.
        patches: by variant, the baseline first; None changes nothing.
        confined: for some variants, the (model, batch) they run at; batch None means any.
    """

    path: Path
    patches: Mapping[str, Patch | None]
    confined: Mapping[str, frozenset[tuple[str, int | None]]]

    def variants_of(self, problem: Problem, only: Sequence[str] | None = None) -> list[str]:
        """Names of the variants that run at a problem; ``only`` keeps these and the baseline."""
        baseline, *others = self.patches
        places = {(problem.model, None), (problem.model, problem.batch)}
        return [baseline] + [
            name
            for name in others
            if (only is None or name in only) and self.confined.get(name, places) & places
        ]


@dataclasses.dataclass(frozen=True)
class Job:
    """One process: a problem under a variant.

    Attributes:
        problem: model, precision and batch.
        variant: of the file.
        file: path of the variants file.
        device: "cuda" or "cpu".
        report: whether the engine's report is wanted.
    """

    problem: Problem
    variant: str
    file: Path
    device: str
    report: bool = False

    def __str__(self) -> str:
        return f"{self.problem} {self.variant}"


def full_name(name: str) -> str:
    """The name of a model, given that or an alias.

    Raises:
        ValueError: unknown; the message lists the nearest.
    """
    return parse_names(ALIASES.get(name, name), list_models(), "models")[0]


def parse_models(text: str, dtype: str) -> list[Problem]:
    """Models and batches as ``NAME:BATCH`` separated by commas; a number alone repeats the model.

    Args:
        text: such as ``T:8,32,swinv2_tiny_window8_256:8``.
        dtype: precision of all.

    Raises:
        ValueError: an unknown model or dtype, or another form.
    """
    form = f"models must be NAME:BATCH,... with batches of at least 1, got {text!r}"
    problems: list[Problem] = []
    model: str | None = None
    for part in filter(None, map(str.strip, text.split(","))):
        name, colon, batch = part.rpartition(":")
        if not batch.isdecimal() or int(batch) < 1:
            raise ValueError(form)
        model = full_name(name) if colon else model
        if model is None:
            raise ValueError(form)
        problems.append(Problem(model, dtype, int(batch)))
    if not problems:
        raise ValueError(form)
    return list(dict.fromkeys(problems))


def load_variants(path: Path) -> VariantsFile:
    """Run a variants file and check what it defines.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be run, or defines something else; the message says what.
    """
    if not path.is_file():
        raise FileNotFoundError(f"variants file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(_MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"variants file {str(path)!r} must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # where dataclasses look for the module that defines them
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"variants file {path}: {type(error).__name__}: {error}") from error
    patches: Any = getattr(module, "VARIANTS", None)
    if not isinstance(patches, dict) or not patches:
        raise ValueError(f"variants file {path} must define VARIANTS, a dict of name: function")
    for name, patch in patches.items():
        if not isinstance(name, str) or not (patch is None or callable(patch)):
            raise ValueError(f"VARIANTS[{name!r}] must be a function or None under a text")
    return VariantsFile(path, patches, _confined(getattr(module, "ONLY", {}), list(patches)))


def _confined(only: Any, variants: list[str]) -> dict[str, frozenset[tuple[str, int | None]]]:
    """``ONLY`` of a variants file, its models' names in full."""
    found = {}
    for variant, models in only.items():
        if variant not in variants[1:]:
            others = ", ".join(variants[1:]) or "none"
            raise ValueError(f"ONLY must name variants after the first ({others}), got {variant!r}")
        if isinstance(models, str):
            raise ValueError(f"ONLY[{variant!r}] must be several models, got the text {models!r}")
        places: set[tuple[str, int | None]] = set()
        for text in models:
            name, _, batch = text.partition(":")
            if batch and not batch.isdecimal():
                raise ValueError(f"ONLY[{variant!r}] must hold NAME or NAME:BATCH, got {text!r}")
            places.add((full_name(name), int(batch) if batch else None))
        found[variant] = frozenset(places)
    return found


def plan_waves(jobs: Sequence[Job], processes: int) -> list[list[Job]]:
    """Waves of at most ``processes`` jobs, those of a problem in one.

    Args:
        jobs: those of a problem one after another.
        processes: that are built and held at a time.

    Raises:
        ValueError: a problem has more jobs than that.
    """
    groups: dict[Problem, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.problem, []).append(job)
    waves: list[list[Job]] = []
    for problem, group in groups.items():
        if len(group) > processes:
            need = f"{len(group)}, the variants of {problem}"
            raise ValueError(f"processes must be at least {need}, got {processes}")
        if not waves or len(waves[-1]) + len(group) > processes:
            waves.append([])
        waves[-1] += group
    return waves

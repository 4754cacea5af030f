"""Names in two directions from one table.

A rule pairs an official prefix with a source prefix, for example

    layers.{i}.blocks.{j}   <->   features.{2i+1}.{j}

``{i}`` and ``{j}`` are numbers, optionally under an affine map ``{ai+b}``. The first rule whose
prefix matches on whole dotted components decides; the rest of the name is carried over. One table
read both ways is why source -> official -> source is the identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

_PLACEHOLDER = re.compile(r"\{(\d*)([a-z])(?:\+(\d+))?\}")


class _Template:
    """One side of a rule: matches a name to its numbers, and builds a name from numbers."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.maps: dict[str, tuple[int, int]] = {}
        pattern, end = "", 0
        for found in _PLACEHOLDER.finditer(template):
            factor, letter, offset = found.groups()
            self.maps[letter] = (int(factor or 1), int(offset or 0))
            pattern += re.escape(template[end : found.start()]) + rf"(?P<{letter}>\d+)"
            end = found.end()
        self.pattern = re.compile(pattern + re.escape(template[end:]) + r"(?P<rest>(?:\..*)?)$")

    def match(self, name: str) -> tuple[dict[str, int], str] | None:
        found = self.pattern.match(name)
        if found is None:
            return None
        numbers = {}
        for letter, (factor, offset) in self.maps.items():
            value = int(found[letter]) - offset
            if value < 0 or value % factor:
                return None
            numbers[letter] = value // factor
        return numbers, found["rest"]

    def build(self, numbers: Mapping[str, int], rest: str) -> str:
        def number(found: re.Match[str]) -> str:
            factor, offset = self.maps[found[2]]
            return str(numbers[found[2]] * factor + offset)

        return _PLACEHOLDER.sub(number, self.template) + rest


class NameTable:
    """An ordered table of (official, source) prefixes, see the module's docstring."""

    def __init__(self, rules: Iterable[tuple[str, str]]) -> None:
        self._rules = [(_Template(official), _Template(source)) for official, source in rules]

    def official_name(self, name: str) -> str:
        """Official name of a source name; an unknown name comes back unchanged."""
        for official, source in self._rules:
            if (found := source.match(name)) is not None:
                return official.build(*found)
        return name

    def source_name(self, name: str) -> str:
        """Source name of an official name; an unknown name comes back unchanged."""
        for official, source in self._rules:
            if (found := official.match(name)) is not None:
                return source.build(*found)
        return name

    def to_official(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole dict under official names."""
        return {self.official_name(name): tensor for name, tensor in state.items()}

    def to_source(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole dict under source names."""
        return {self.source_name(name): tensor for name, tensor in state.items()}

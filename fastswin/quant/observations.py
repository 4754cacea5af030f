"""Histograms of all layers, to be written, resumed and summed over processes.

On disk they are one safetensors file: per tensor the numbers and counts of the bins that hold
anything, int64, and the counts of images and batches with the model's fingerprint as metadata.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from fastswin.quant.files import sorted_header, write_whole
from fastswin.quant.observers import BINS, Histogram


class Observations:
    """What calibration saw of one model.

    Args:
        model_fingerprint: of the weights that produced it.

    Attributes:
        images, batches: how many were seen.
    """

    def __init__(self, model_fingerprint: str) -> None:
        self.model_fingerprint = model_fingerprint
        self.images = 0
        self.batches = 0
        self._histograms: dict[str, Histogram] = {}

    def histogram(self, layer: str, part: str) -> Histogram:
        """The histogram of a layer's "input", "output", "q", "k" or "v"; new ones are empty."""
        return self._histograms.setdefault(f"{layer}:{part}", Histogram())

    def merge(self, other: Observations) -> None:
        """Add what another process or run saw.

        Raises:
            ValueError: it saw other weights.
        """
        if other.model_fingerprint != self.model_fingerprint:
            raise ValueError("observations: made with other weights")
        self.images += other.images
        self.batches += other.batches
        for key, histogram in other._histograms.items():
            self._histograms.setdefault(key, Histogram()).merge(histogram)

    def all_reduce(self, device: torch.device) -> None:
        """Sum over all processes of ``torch.distributed``; nothing without it.

        Args:
            device: where the backend wants its tensors.

        Raises:
            ValueError: the processes run different weights.
        """
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        gathered: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(gathered, (self.model_fingerprint, sorted(self._histograms)))
        if any(fingerprint != self.model_fingerprint for fingerprint, _ in gathered):
            raise ValueError("calibration: the processes run different weights")
        # a process without images has no histograms of its own but must join every sum
        keys = sorted({key for _, keys in gathered for key in keys})
        where = device if distributed.get_backend() == "nccl" else torch.device("cpu")
        for key in keys:
            histogram = self._histograms.setdefault(key, Histogram())
            counts = histogram.counts.to(where)
            distributed.all_reduce(counts)
            histogram.counts = counts.cpu()
            largest = torch.tensor(histogram.largest, dtype=torch.float64, device=where)
            distributed.all_reduce(largest, distributed.ReduceOp.MAX)
            histogram.largest = float(largest)
        totals = torch.tensor([self.images, self.batches], device=where)
        distributed.all_reduce(totals)
        self.images, self.batches = (int(n) for n in totals)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, which appears whole or not at all."""
        from safetensors.torch import save

        tensors = {}
        for key, histogram in sorted(self._histograms.items()):
            bins = histogram.counts.nonzero().flatten()
            tensors[f"{key}:bins"] = bins
            tensors[f"{key}:counts"] = histogram.counts[bins]
            tensors[f"{key}:largest"] = torch.tensor([histogram.largest], dtype=torch.float64)
        metadata = {
            "model_fingerprint": self.model_fingerprint,
            "images": str(self.images),
            "batches": str(self.batches),
        }
        write_whole(path, sorted_header(save(tensors, metadata)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Observations:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: another kind of file.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                seen = cls(metadata["model_fingerprint"])
                seen.images, seen.batches = int(metadata["images"]), int(metadata["batches"])
                for name in file.keys():  # noqa: SIM118
                    key, _, field = name.rpartition(":")
                    if field == "counts":
                        histogram = seen._histograms.setdefault(key, Histogram())
                        counts = torch.zeros(BINS, dtype=torch.int64)
                        counts[file.get_tensor(f"{key}:bins")] = file.get_tensor(name)
                        histogram.counts = counts
                        histogram.largest = float(file.get_tensor(f"{key}:largest"))
        except (KeyError, ValueError, SafetensorError) as error:
            raise ValueError(f"state: {path} holds no calibration state ({error})") from error
        return seen

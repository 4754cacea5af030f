"""A model with all that is needed to show it photos: weights, preprocessing and class names."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from fastswin.data.class_names import class_names_for
from fastswin.data.preprocess import Preprocess, from_metadata
from fastswin.data.shipped import SHIPPED, shipped_checkpoint
from fastswin.models import SwinTransformer, create_model, list_models, load_checkpoint
from fastswin.quant import Calibration, load_ranges
from fastswin.quant.storage import QUANT_KEY

#: Ranges of a shipped checkpoint, beside it.
RANGES_NAME = "ranges.json"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A loaded model.

    Attributes:
        name: what the user called it: a model name or the checkpoint's path.
        model: the readable model in fp32 on the CPU, in evaluation mode.
        preprocess: what its images go through.
        class_names: one name a class.
        ranges: file with quantisation ranges of these weights; None where there is none.
    """

    name: str
    model: SwinTransformer
    preprocess: Preprocess
    class_names: list[str]
    ranges: Path | None = None

    def calibrations(self, path: str | Path | None = None) -> dict[str, Calibration]:
        """Quantisation ranges by scheme name, checked against the weights.

        Args:
            path: file of ranges, or a calibrated checkpoint; None takes those that came with the
                model, if any.

        Raises:
            QuantizationError: ranges that do not fit the model; none in a file that was given.
        """
        path = self.ranges if path is None else Path(path)
        return {} if path is None else load_ranges(path, self.model)


def open_source(
    model: str | None = None, checkpoint: str | Path | None = None, *, pretrained: bool = True
) -> ModelSource:
    """Load a model by name or from a checkpoint file.

    Args:
        model: a shipped or published name; with ``checkpoint`` it says which variant that is.
        checkpoint: a file of any supported layout.
        pretrained: whether a published name gets its weights (from the hub) or random ones.

    Raises:
        ValueError: neither argument, an unknown name (the nearest ones are listed), or a
            checkpoint of another architecture.
        FileNotFoundError: the checkpoint or shipped weights are missing.
        RuntimeError: published weights cannot be fetched here.
    """
    if model is not None:
        check_name(model)
    if checkpoint is not None:
        path = Path(checkpoint)
        if not path.is_file():
            raise FileNotFoundError(f"checkpoint: {path} is not a file")
        return _from_file(str(path), path, None if model in SHIPPED else model)
    if model is None:
        raise ValueError("give model= or checkpoint=")
    if model in SHIPPED:
        return _from_file(model, shipped_checkpoint(model))
    return _described(model, create_model(model, pretrained=pretrained).eval(), None, None)


def check_name(name: str) -> None:
    """Raise ValueError, listing the nearest names, unless a model is called that."""
    base = name.partition(".")[0]
    if name in SHIPPED or base in list_models():
        return
    known = [*SHIPPED, *list_models()]
    begun = [candidate for candidate in known if base and candidate.startswith(base)]
    nearest = begun[:3] or difflib.get_close_matches(base, known, n=3, cutoff=0.3)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    raise ValueError(f"model: unknown name {name!r}{hint} (see fastswin models)")


def _from_file(name: str, path: Path, variant: str | None = None) -> ModelSource:
    loaded = load_checkpoint(path, model_name=variant)
    source = _described(name, loaded.model, *from_metadata(loaded.metadata))
    beside = path.with_name(RANGES_NAME)  # for shipped weights alone: a name proves nothing
    shipped = name in SHIPPED and beside.is_file()
    ranges = path if QUANT_KEY in loaded.metadata else beside if shipped else None
    return dataclasses.replace(source, ranges=ranges)


def _described(
    name: str, net: SwinTransformer, preprocess: Preprocess | None, names: list[str] | None
) -> ModelSource:
    config = net.config
    preprocess = preprocess or Preprocess.for_config(config)
    if preprocess.in_channels != config.in_channels:
        raise ValueError(
            f"{name}: its preprocessing has {preprocess.in_channels} channels, the model "
            f"{config.in_channels}"
        )
    if names is not None and len(names) != config.num_classes:
        raise ValueError(f"{name}: {len(names)} class names for {config.num_classes} classes")
    return ModelSource(name, net, preprocess, names or class_names_for(config.num_classes))

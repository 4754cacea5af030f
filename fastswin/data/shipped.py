"""Weights that come with the package."""

from __future__ import annotations

from pathlib import Path

from fastswin.data.fashion_mnist import ASSETS

#: Model name to its file inside the package.
SHIPPED: dict[str, Path] = {"swin_fashion_mnist": ASSETS / "swin_fashion_mnist.safetensors"}

#: What commands use where no model is named.
DEFAULT_MODEL = "swin_fashion_mnist"


class ShippedWeightsMissingError(FileNotFoundError):
    """This installation lacks weights that belong to it."""


def shipped_checkpoint(name: str) -> Path:
    """File of a model whose weights come with the package.

    Args:
        name: a key of :data:`SHIPPED`.

    Raises:
        ValueError: no such shipped model; the message lists them.
        ShippedWeightsMissingError: this installation lacks the file.
    """
    if name not in SHIPPED:
        raise ValueError(f"model {name!r} does not ship with fastswin; legal: {sorted(SHIPPED)}")
    path = SHIPPED[name]
    if not path.is_file():
        raise ShippedWeightsMissingError(
            f"model {name!r}: its weights are missing from this installation ({path.name}); "
            "examples/train_fashion.py makes them"
        )
    return path

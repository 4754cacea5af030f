"""Our own files: safetensors with the configuration inside, so that they load without a hint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastswin.models.swin import SwinTransformer

#: Metadata key of the configuration as JSON.
CONFIG_KEY = "fastswin_config"


def save_checkpoint(
    model: SwinTransformer,
    path: str | os.PathLike[str],
    extra_metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write weights and configuration to one ``.safetensors`` file, atomically.

    Args:
        model: any dtype and device; tensors are stored in their dtype.
        path: file that ends in ``.safetensors``; an old one is replaced only by a complete one.
        extra_metadata: JSON-ready values such as class names, returned by the loader.

    Returns:
        The path.

    Raises:
        ValueError: another suffix, or a reserved metadata key.
        TypeError: a metadata value is not JSON-ready.
    """
    from safetensors.torch import save

    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"path must end in .safetensors, got {path}")
    extra = dict(extra_metadata or {})
    if reserved := sorted({CONFIG_KEY, "format"} & set(extra)):
        raise ValueError(f"extra_metadata must not use the reserved keys {reserved}")
    metadata = {"format": "pt", CONFIG_KEY: json.dumps(model.config.to_dict())}
    metadata |= {key: json.dumps(value) for key, value in extra.items()}
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    _write_atomically(path, save(tensors, metadata=metadata))
    return path


def _write_atomically(path: Path, content: bytes) -> None:
    """A crash leaves either the old file or the new one, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

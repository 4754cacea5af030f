"""Reading weights safely: ``.safetensors``, or ``torch.load(weights_only=True)``, nothing else.

A pickle can run code. One that needs any object beyond tensors and plain containers is refused,
the object is named, and there is no fallback. What a file is, is told from its first bytes.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastswin.models.checkpoint.errors import CheckpointError

_PLAIN_WRAPPERS = ("model", "state_dict", "model_state_dict")
_EMA_WRAPPERS = ("state_dict_ema", "model_ema", "ema_state_dict")

Source = str | os.PathLike[str] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RawCheckpoint:
    """Tensors as they were stored.

    Attributes:
        state: name to tensor, wrappers removed, prefixes kept.
        metadata: string metadata of a safetensors file.
        wrapper: dotted path of the wrappers removed, such as "state_dict"; empty for a bare dict.
        ema: whether the averaged weights were taken.
    """

    state: dict[str, torch.Tensor]
    metadata: dict[str, str]
    wrapper: str
    ema: bool


def read_checkpoint(source: Source, *, ema: bool = False) -> RawCheckpoint:
    """Read a file or unwrap a dict.

    Args:
        source: path of a ``.safetensors`` or PyTorch file, or a dict of tensors or wrappers.
        ema: take the averaged weights where a file holds both; plain weights otherwise.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: no checkpoint, a truncated one, a pickle that needs code, or no such
            weights inside; one line that says which.
    """
    metadata: dict[str, str] = {}
    content: Any = source
    if not isinstance(source, Mapping):
        content, metadata = _read_file(Path(source))
    state, wrapper, averaged = _unwrap(content, ema, "")
    if not state:
        raise CheckpointError(f"no tensors found in {_shown(source)}")
    if ema and not averaged:
        raise CheckpointError(
            f"ema=True but there are no averaged weights (one of {', '.join(_EMA_WRAPPERS)}) in "
            f"{_shown(source)}"
        )
    return RawCheckpoint(state, metadata, wrapper, averaged)


def _read_file(path: Path) -> tuple[Any, dict[str, str]]:
    if not path.exists():
        raise FileNotFoundError(f"no such checkpoint: {path}")
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; give the weights file inside it")
    with path.open("rb") as file:
        head = file.read(9)
    if len(head) == 9 and head[8:] == b"{":  # 8 bytes of header length, then its JSON
        return _read_safetensors(path)
    return _read_torch(path, head), {}


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # a copy: the mapping of the file must not outlive a later overwrite of it
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is a truncated or damaged safetensors file ({_first_line(error)})"
        ) from error


def _read_torch(path: Path, head: bytes) -> Any:
    if not head.startswith((b"PK", b"\x80")):
        raise CheckpointError(f"{path} is neither a safetensors nor a PyTorch file")
    try:
        with path.open("rb") as file:  # given a path, torch.load would go by its suffix
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything inside the unpickler
        blocker = _blocking_object(error) if isinstance(error, pickle.UnpicklingError) else None
        if blocker is None:
            raise CheckpointError(
                f"{path} is a truncated or damaged PyTorch file ({_first_line(error)})"
            ) from error
        raise CheckpointError(
            f"{path} needs code to load: it holds {blocker}, and only tensors and plain "
            "containers are read; save the weights alone (torch.save(state_dict, path)) or "
            "convert the file to safetensors where you trust it"
        ) from error


def _blocking_object(error: Exception) -> str | None:
    """Dotted name of what the safe unpickler refused, None when it refused nothing by name."""
    for pattern in (r"GLOBAL ([\w.]+)", r"unsupported class ([\w.]+)", r"<class '([\w.]+)'>"):
        if found := re.search(pattern, str(error)):
            return found[1]
    return None


def _unwrap(content: Any, ema: bool, path: str) -> tuple[dict[str, torch.Tensor], str, bool]:
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path or 'the checkpoint'} is a {type(content).__name__}, expected a dict of tensors"
        )
    plain = [k for k in _PLAIN_WRAPPERS if _is_dict(content.get(k))]
    averaged = [k for k in _EMA_WRAPPERS if _is_dict(content.get(k))]
    chosen = averaged if averaged and (ema or not plain) else plain
    if not chosen:
        tensors = {
            str(name): tensor.detach()
            for name, tensor in content.items()
            if isinstance(tensor, torch.Tensor)
        }
        return tensors, path, path.rpartition(".")[2] in _EMA_WRAPPERS
    if len(chosen) > 1:
        raise CheckpointError(
            f"more than one set of weights: {', '.join(chosen)}; pass the one you mean as a dict"
        )
    inner = f"{path}.{chosen[0]}" if path else chosen[0]
    state, wrapper, inner_ema = _unwrap(content[chosen[0]], ema and not averaged, inner)
    return state, wrapper, inner_ema or chosen is averaged


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return text or type(error).__name__


def _shown(source: Source) -> str:
    return "the given dict" if isinstance(source, Mapping) else str(source)

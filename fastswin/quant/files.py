"""Files that are whole and reproducible: the same content gives the same bytes.

The safetensors library writes its metadata in an order that changes from process to process;
:func:`sorted_header` puts it in order, padded to eight bytes as the format wants.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def sorted_header(content: bytes) -> bytes:
    """A safetensors file with the keys of its metadata sorted; the tensors are untouched."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if "__metadata__" in header:
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

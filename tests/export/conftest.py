"""Export tests share the reference models of tests/models."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))  # swin_references

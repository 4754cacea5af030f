"""The inference engine: a Swin model or checkpoint in, the same answers out, faster."""

from fastswin.engine.engine import Engine
from fastswin.engine.report import EngineReport

__all__ = ["Engine", "EngineReport"]

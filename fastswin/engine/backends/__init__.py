"""CPU engines behind :class:`fastswin.Engine`: one graph of the model, emitted for each runtime."""

from fastswin.engine.backends.choose import BACKENDS, Backend, BackendSelector, Choice
from fastswin.engine.backends.runner import GraphRunner

__all__ = ["BACKENDS", "Backend", "BackendSelector", "Choice", "GraphRunner"]

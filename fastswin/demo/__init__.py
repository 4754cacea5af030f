"""The demonstration: shipped weights on shipped images, parity, latency, and a report of it."""

from fastswin.demo.run import run_demo

__all__ = ["run_demo"]

"""The ``fastswin`` command: parse, call, print."""

"""8-bit layers of an engine: weights, formats, mix and forward pass."""

"""A product with few rows and long sums: K is cut over programs, the sums are joined in a norm."""

from fastswin.ops.split_k.api import add_split_k, split_k_linear

__all__ = ["add_split_k", "split_k_linear"]

"""LayerNorm, qkv and window attention in one kernel; with proj and residual the whole half."""

from fastswin.ops.attention_half.api import attention_half

__all__ = ["attention_half"]

"""Which tensors of an exported graph become fp16, and which stay fp32.

fp16: weights, the residual stream, the products of linear layers and of attention.

fp32, because fp16 would lose the answer:
    bias, mask and softmax   scores up to about 100 are spaced 0.06 in fp16, and exp amplifies that
    V2's cosine norm         a sum of 32 squares beyond 256 overflows
    mean and variance        inside LayerNormalization (stash_type 1), which every runtime honours
    images and outputs       so that callers of both precisions are the same

Every conversion is a Cast in the graph: a strongly typed builder need not guess.
"""

from __future__ import annotations

import torch
from torch import nn

from fastswin.export.graph_layers import GraphLinear, GraphNorm, GraphPatchEmbed

FP16_LIMIT = torch.finfo(torch.float16).max


def to_half(graph: nn.Module) -> None:
    """Store the weights of linear layers, norms and the patch embedding in fp16, in place.

    Raises:
        ValueError: a weight is beyond fp16's range; the message names it.
    """
    for name, module in graph.named_modules():
        for key in ("keep", "shifted_keep", "pool_weight", "pad_qkv"):
            if isinstance(getattr(module, key, None), torch.Tensor):
                setattr(module, key, nn.Buffer(getattr(module, key).half()))
        if not isinstance(module, (GraphLinear, GraphNorm, GraphPatchEmbed)):
            continue
        for key, tensor in module.named_buffers(recurse=False):
            largest = tensor.abs().max().item() if tensor.numel() else 0.0
            if largest > FP16_LIMIT:
                raise ValueError(
                    f"precision='fp16': {name}.{key} holds {largest:.3g}, beyond fp16's "
                    f"{FP16_LIMIT:.0f}; export in fp32"
                )
            setattr(module, key, nn.Buffer(tensor.half()))

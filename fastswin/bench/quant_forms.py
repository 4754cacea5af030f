"""Forms of a half block that differ in what is 8-bit, who multiplies, and in how many kernels."""

from __future__ import annotations

import dataclasses

from fastswin.engine.prepared import Linear, PreparedBlock
from fastswin.engine.quantized.formats import WIDE_LAYER, BlockFormats, LayerFormat
from fastswin.engine.quantized.prepare import LayerForms


@dataclasses.dataclass(frozen=True)
class Form:
    """What of a half is in 8 bits.

    Attributes:
        layers: kinds of layers.
        narrow_attention: whether q, k and v are stored in 8 bits, where the scheme has that.
        one_kernel: whether the MLP is one 8-bit kernel.
        library: kinds of layers that the CUDA library multiplies, where it can.
    """

    layers: tuple[str, ...] = ()
    narrow_attention: bool = True
    one_kernel: bool = False
    library: tuple[str, ...] = ()

    def in_library(self) -> dict[str, Form]:
        """The same with some or all products by the library, named by what it multiplies.

        It has no MLP in one kernel, and its weight of qkv holds the steps of an 8-bit output.
        """
        if not self.layers or self.one_kernel or not self.narrow_attention:
            return {}
        several = self.layers if len(self.layers) > 1 else ()
        found = {f"{kind} in library": (kind,) for kind in several} | {"library": self.layers}
        return {name: dataclasses.replace(self, library=kinds) for name, kinds in found.items()}

    def block(self, formats: BlockFormats, block: PreparedBlock, fits: bool) -> BlockFormats:
        """A block with only these layers in 8 bits; ``fits``: one kernel can hold its MLP."""
        qkv, proj, fc1, fc2 = (
            self.layer(kind, getattr(formats, kind), getattr(block, kind))
            for kind in ("qkv", "proj", "fc1", "fc2")
        )
        narrow = qkv.quantized and self.narrow_attention
        return BlockFormats(
            qkv, formats.attention if narrow else "wide", proj, fc1, fc2,
            "fused" if self.one_kernel and fits else "split",
        )  # fmt: skip

    def layer(self, kind: str, layer: LayerFormat, forms: Linear) -> LayerFormat:
        """How one layer runs, where the scheme has it as ``layer``."""
        if kind not in self.layers:
            return WIDE_LAYER
        if kind in self.library and isinstance(forms, LayerForms) and forms.has_library:
            return LayerFormat("fp8", "cublaslt")
        return layer


#: Halves of a block, and merging: the wide form, then those that add 8-bit layers.
HALVES: dict[str, dict[str, Form]] = {
    "attention": {
        "wide": Form(),
        "qkv": Form(("qkv",)),
        "qkv, wide attention": Form(("qkv",), narrow_attention=False),
        "qkv+proj": Form(("qkv", "proj")),
        "qkv+proj, wide attention": Form(("qkv", "proj"), narrow_attention=False),
    },
    "mlp": {
        "wide": Form(),
        "fc1+fc2": Form(("fc1", "fc2")),
        "one kernel": Form(("fc1", "fc2"), one_kernel=True),
    },
    "merge": {"wide": Form(), "reduction": Form(("reduction",))},
}

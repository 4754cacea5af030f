"""Shape arithmetic of a graph for any image size, as ONNX functions that are inlined afterwards.

PyTorch's exporter proves a guard for every division of a symbolic side, which takes minutes for a
whole Swin and specialises where it cannot. So the model is traced at one size with one placeholder
node for each step that depends on the size, and the placeholder's body, below, reads the size when
the graph runs. Per axis, with ``side`` tokens, window ``w`` and shift ``S`` (0 where one window
covers the axis):

    padded = ceil(side / w) * w
    place p of the rolled axis holds token (p + S) mod padded, padding where that is >= side
    p >= padded - S: the shift brought it from the other end

A map smaller than its window would need another bias table: there the lookup in a table of one
entry fails, which a runtime reports, instead of a wrong answer.
"""

from __future__ import annotations

from typing import Any

from fastswin.models.geometry import WindowConvention
from fastswin.ops.window_attention.geometry import SHIFT_MASK_FILL

Pair = tuple[int, int]

DOMAIN = "fastswin.dynamic"


def ints(*values: int) -> str:
    """A constant int64 vector in ONNX's text format."""
    return f"Constant <value = int64[{len(values)}] {{{', '.join(map(str, values))}}}> ()"


def pad_images(patch: int) -> str:
    """Images ``[B, C, h, w]`` padded with zeros to whole patches."""
    return f"""
    PadImages_{patch} (images) => (padded) {{
        patch = {ints(patch)}
        before = {ints(0, 0, 0, 0, 0, 0)}
        sides = Shape <start = 2, end = 4> (images)
        negative = Neg (sides)
        missing = Mod (negative, patch)
        pads = Concat <axis = 0> (before, missing)
        padded = Pad (images, pads)
    }}"""


def windows(name: str, window: Pair, shifted: bool, convention: WindowConvention) -> str:
    """Map ``[B, H, W, C]`` to ``index [T]``, ``keep [T, 1]``, ``place [H * W]`` and ``mask``.

    ``index`` is the token at each place of the windows, ``keep`` 0 where that is padding,
    ``place`` the inverse, ``mask [nW, 1, N, N]`` the shift mask.
    """
    height, width = window
    shift = (height // 2, width // 2) if shifted else (0, 0)
    least = "sides = Identity (grid)"
    if convention == "microsoft":  # one rule for both axes
        least = "sides = ReduceMin <keepdims = 1> (grid)"
        width_limit = height_limit = min(window)
    else:
        height_limit, width_limit = window
    limits = (height_limit,) if convention == "microsoft" else (height_limit, width_limit)
    refuse = "small = Sub (zero, zero)"
    if convention != "torchvision":
        refuse = """below = Less (grid, window)
        below_int = Cast <to = 7> (below)
        small = ReduceMax <keepdims = 1> (below_int)"""
    axes = ""
    for axis, (letter, form, place) in enumerate(
        (("r", f"-1, 1, {height}, 1", "-1, 1"), ("c", f"1, -1, 1, {width}", "1, -1"))
    ):
        axes += f"""
        at_{letter} = {ints(axis)}
        form_{letter} = Constant <value = int64[4] {{{form}}}> ()
        flat_{letter} = Constant <value = int64[2] {{{place}}}> ()
        side_{letter} = Gather (grid, at_{letter})
        padded_{letter} = Gather (padded, at_{letter})
        shift_{letter} = Gather (shift, at_{letter})
        window_{letter} = Gather (window, at_{letter})
        end_{letter} = Squeeze (padded_{letter})
        p_{letter} = Range (start, end_{letter}, step)
        moved_{letter} = Add (p_{letter}, shift_{letter})
        token_1d_{letter} = Mod (moved_{letter}, padded_{letter})
        token_{letter} = Reshape (token_1d_{letter}, form_{letter})
        inside_{letter} = Less (token_{letter}, side_{letter})
        split_{letter} = Sub (padded_{letter}, shift_{letter})
        far_1d_{letter} = GreaterOrEqual (p_{letter}, split_{letter})
        far_int_{letter} = Cast <to = 7> (far_1d_{letter})
        far_{letter} = Reshape (far_int_{letter}, form_{letter})
        stop_{letter} = Squeeze (side_{letter})
        t_{letter} = Range (start, stop_{letter}, step)
        back_{letter} = Sub (t_{letter}, shift_{letter})
        q_1d_{letter} = Mod (back_{letter}, padded_{letter})
        q_{letter} = Reshape (q_1d_{letter}, flat_{letter})
        block_{letter} = Div (q_{letter}, window_{letter})
        rest_{letter} = Mod (q_{letter}, window_{letter})"""
    tokens = height * width
    return f"""
    {name} (x) => (index, keep, place, mask) {{
        start = Constant <value = int64 {{0}}> ()
        step = Constant <value = int64 {{1}}> ()
        zero = {ints(0)}
        one = {ints(1)}
        two = {ints(2)}
        flat = {ints(-1)}
        column = {ints(-1, 1)}
        queries = {ints(-1, 1, tokens, 1)}
        keys = {ints(-1, 1, 1, tokens)}
        window = {ints(*window)}
        half = {ints(*shift)}
        limit = {ints(*limits)}
        count_tokens = {ints(tokens)}
        fill = Constant <value = float {{{SHIFT_MASK_FILL}}}> ()
        grid = Shape <start = 1, end = 3> (x)
        {least}
        {refuse}
        legal = Gather (zero, small)
        covered = LessOrEqual (sides, limit)
        wanted = Where (covered, zero, half)
        shift = Add (wanted, legal)
        more = Add (grid, window)
        most = Sub (more, one)
        count = Div (most, window)
        padded = Mul (count, window){axes}
        row_start = Mul (token_r, side_c)
        token = Add (row_start, token_c)
        inside = And (inside_r, inside_c)
        real = Where (inside, token, zero)
        index = Reshape (real, flat)
        kept = Cast <to = 1> (inside)
        keep = Reshape (kept, column)
        far_rows = Mul (far_r, two)
        region = Add (far_rows, far_c)
        region_q = Reshape (region, queries)
        region_k = Reshape (region, keys)
        same = Equal (region_q, region_k)
        apart = Not (same)
        apart_float = Cast <to = 1> (apart)
        mask = Mul (apart_float, fill)
        count_c = Gather (count, at_c)
        window_row = Mul (block_r, count_c)
        which = Add (window_row, block_c)
        first = Mul (which, count_tokens)
        inner_row = Mul (rest_r, window_c)
        inner = Add (inner_row, rest_c)
        place_2d = Add (first, inner)
        place = Reshape (place_2d, flat)
    }}"""


def partition(name: str, tokens: int, channels: int) -> str:
    """Map ``[B, H, W, C]`` to windows ``[B * nW, N, C]``, zeros where padded."""
    return f"""
    {name} (x, index, keep) => (windows) {{
        flat = {ints(0, -1, channels)}
        split = {ints(-1, tokens, channels)}
        stream = Reshape (x, flat)
        ordered = Gather <axis = 1> (stream, index)
        kept = CastLike (keep, ordered)
        blanked = Mul (ordered, kept)
        windows = Reshape (blanked, split)
    }}"""


def unpartition(name: str, channels: int) -> str:
    """Windows back to the map that ``x`` is; padding is dropped."""
    return f"""
    {name} (windows, index, place, x) => (grid) {{
        any = {ints(-1)}
        channels = {ints(channels)}
        length = Shape (index)
        flat = Concat <axis = 0> (any, length, channels)
        stream = Reshape (windows, flat)
        ordered = Gather <axis = 1> (stream, place)
        shape = Shape (x)
        grid = Reshape (ordered, shape)
    }}"""


def add_bias(name: str, tokens: int, heads: int) -> str:
    """Scores ``[B * nW, nH, N, N]`` plus bias plus mask."""
    return f"""
    {name} (scores, bias, mask) => (sums) {{
        any = {ints(-1)}
        rest = {ints(heads, tokens, tokens)}
        back = {ints(-1, heads, tokens, tokens)}
        count = Shape <start = 0, end = 1> (mask)
        shape = Concat <axis = 0> (any, count, rest)
        split = Reshape (scores, shape)
        both = Add (bias, mask)
        added = Add (split, both)
        sums = Reshape (added, back)
    }}"""


def reshape(name: str, rest: tuple[int, ...]) -> str:
    """Any tensor to ``[-1, *rest]``; PyTorch's exporter would write the traced size for the -1."""
    return f"""
    {name} (x) => (shaped) {{
        shape = {ints(-1, *rest)}
        shaped = Reshape (x, shape)
    }}"""


def split() -> str:
    """The qkv projection ``[..., 3C]`` to its three parts."""
    return """
    SplitQkv (x) => (q, k, v) {
        q, k, v = Split <axis = -1, num_outputs = 3> (x)
    }"""


def merge() -> str:
    """Map ``[B, H, W, C]`` to its 2x2 neighbours ``[B, ceil(H / 2), ceil(W / 2), 4C]``."""
    slices = "".join(
        f"""
        begin_{name} = {ints(*begin)}
        part_{name} = Slice (padded, begin_{name}, end, axes, steps)"""
        for name, begin in (("a", (0, 0)), ("b", (1, 0)), ("c", (0, 1)), ("d", (1, 1)))
    )
    return f"""
    Merge (x) => (neighbours) {{
        before = {ints(0, 0, 0, 0, 0)}
        after = {ints(0)}
        two = {ints(2)}
        end = {ints(2**62, 2**62)}
        axes = {ints(1, 2)}
        steps = {ints(2, 2)}
        sides = Shape <start = 1, end = 3> (x)
        odd = Mod (sides, two)
        pads = Concat <axis = 0> (before, odd, after)
        padded = Pad (x, pads){slices}
        neighbours = Concat <axis = -1> (part_a, part_b, part_c, part_d)
    }}"""


def parse(text: str, opset: int) -> Any:
    """A function's text to an ``onnx.FunctionProto`` of :data:`DOMAIN`."""
    import onnx.parser

    header = f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">'
    return onnx.parser.parse_function(header + text)

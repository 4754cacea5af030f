"""The persistent stage assembles for Hopper, the only generation that it runs on."""

from __future__ import annotations

from pathlib import Path

from ahead_of_time import compile_each

from fastswin.testing.aot import SHARED_MEMORY_LIMIT


def test_fits_one_program_per_multiprocessor():
    """Launched cooperatively, without spills and within one program's shared memory."""
    script = Path(__file__).with_name("compile_persistent_stage.py")
    ((kernel,),) = compile_each(script, (("90",),))
    assert kernel["options"] == {"num_warps": 4, "launch_cooperative_grid": True}
    assert kernel["grid"] == [112]
    assert kernel["spill_bytes"] == 0
    assert kernel["shared_bytes"] <= SHARED_MEMORY_LIMIT[90] * 1024

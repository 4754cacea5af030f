"""Benchmarks: right first, then timed side by side, then recorded.

from fastswin.bench import make_problems, run_model_suite
result = run_model_suite(make_problems("model", batches=[1, 32]))
"""

from fastswin.bench.compile_cache import warm_compile_cache
from fastswin.bench.contenders import VARIANTS
from fastswin.bench.measurement import Outcome
from fastswin.bench.problems import SUITES, Problem, make_problems
from fastswin.bench.roofline import roofline_ms, swin_flops, swin_fused_bytes
from fastswin.bench.suites import SuiteResult, run_model_suite
from fastswin.bench.timing import Timing, measure

__all__ = [
    "SUITES",
    "VARIANTS",
    "Outcome",
    "Problem",
    "SuiteResult",
    "Timing",
    "make_problems",
    "measure",
    "roofline_ms",
    "run_model_suite",
    "swin_flops",
    "swin_fused_bytes",
    "warm_compile_cache",
]

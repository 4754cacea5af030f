"""Run a program that compiles kernels once for several cards: each start of torch takes seconds."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

Runs = tuple[tuple[str, ...], ...]

_DRIVER = """
import json, runpy, sys
program, runs = sys.argv[1], json.loads(sys.argv[2])
for arguments in runs:
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
    print(json.dumps("end of a run"), flush=True)
"""


@functools.cache
def compile_each(program: Path, runs: Runs) -> list[list[dict]]:
    """What ``program`` prints, as JSON lines, for each list of arguments, from one process.

    Outside the interpreter, whatever this process does: Triton decides that once per process.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(program), json.dumps(runs)],
        capture_output=True, text=True, check=False, timeout=550,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[dict]] = [[]]
    for line in map(json.loads, done.stdout.splitlines()):
        if line == "end of a run":
            found.append([])
        else:
            assert not line.get("idle_barriers"), f"barriers that nobody uses: {line}"
            found[-1].append(line)
    assert len(found) == len(runs) + 1
    return found[:-1]

"""A launcher of processes that is watched, limited in time, and tells where it hung.

Output goes to a file, not to a pipe, so that nothing waits for a reader. A launcher that is not
done in time gets SIGTERM and passes it on; processes that registered for it
(:func:`tell_stacks_on_termination`) answer with the stacks of all their threads.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import IO

#: Lines of output that are shown of a group that did not end well.
SHOWN_LINES = 200

#: Seconds that the launcher has to end its processes before it is killed.
STOP_S = 10.0


def tell_stacks_on_termination() -> None:
    """On SIGTERM write the Python stacks of all threads to standard error, then end as before."""
    faulthandler.register(signal.SIGTERM, chain=True)


def run_group(
    command: Sequence[str],
    limit_s: float,
    progress: Callable[[str], None] = lambda line: None,
    watch: Callable[[], None] = lambda: None,
) -> str | None:
    """Run a launcher with this process's environment; None, or why it did not end well.

    NCCL's switches (``NCCL_NVLS_ENABLE`` and the like) reach the processes as they are set here.

    Args:
        command: the launcher's.
        limit_s: seconds until it is told to end, which its processes answer with their stacks.
        progress: receives the last lines of the output of a group that did not end well.
        watch: called every second while it runs.
    """
    with tempfile.TemporaryFile("w+") as output:
        failure = _await_group(command, limit_s, output, watch)
        output.seek(0)
        said = output.read().strip().splitlines()
    if failure is None:
        return None
    for line in said[-SHOWN_LINES:]:
        progress(line)
    errors = [line.strip() for line in said if "Error: " in line]
    return failure or f"failed: {(errors or said[-1:] or ['no output'])[0]}"


def _await_group(
    command: Sequence[str], limit_s: float, output: IO[str], watch: Callable[[], None]
) -> str | None:
    """None where the launcher ended well, what the clock says where it did not end, else ""."""
    began = time.monotonic()
    with subprocess.Popen(
        command, env=os.environ.copy(), text=True, stdout=output, stderr=subprocess.STDOUT
    ) as launcher:
        while time.monotonic() - began < limit_s:
            try:
                launcher.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                watch()
                continue
            watch()
            return None if launcher.returncode == 0 else ""
        launcher.send_signal(signal.SIGTERM)  # it ends its processes, which kill would orphan
        try:
            launcher.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
    return f"not done after {limit_s:.0f} s"

"""TF32 flags: right inside the scope, untouched after it, from any state the caller left."""

import json
import subprocess
import sys

import pytest

STATES = {
    "default": "",
    "legacy-on": "torch.backends.cuda.matmul.allow_tf32 = True",
    "legacy-cudnn-off": "torch.backends.cudnn.allow_tf32 = False",
    "level-high": "torch.set_float32_matmul_precision('high')",
    "level-medium": "torch.set_float32_matmul_precision('medium')",
    "medium-then-legacy-off": (
        "torch.set_float32_matmul_precision('medium')\n"
        "torch.backends.cuda.matmul.allow_tf32 = False"
    ),
    "new-tf32": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "new-conv-ieee": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "new-cudnn-ieee": "torch.backends.cudnn.fp32_precision = 'ieee'",
    "high-then-new-ieee": (
        "torch.set_float32_matmul_precision('high')\n"
        "torch.backends.cuda.matmul.fp32_precision = 'ieee'"
    ),
    "all-tf32": "torch.backends.fp32_precision = 'tf32'",
}

SCRIPT = """
import json, os, sys, torch, traceback
from fastswin.bench.precision import fp32_scope, tf32_state

def scopes_leave_no_trace():
    before = tf32_state()
    for tf32 in (False, True, True, False):
        try:
            with fp32_scope(tf32=tf32):
                inside = tf32_state()
                flags = (inside.matmul, inside.conv, inside.rnn)
                assert all((flag == "tf32") is tf32 for flag in flags), (tf32, inside)
                raise KeyError
        except KeyError:
            pass
        assert tf32_state() == before, (before, tf32_state())
    with fp32_scope(tf32=True):
        outer = tf32_state()
        with fp32_scope(tf32=False):
            pass
        assert tf32_state() == outer
    assert tf32_state() == before

for name, setup in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        try:
            exec(setup)
            scopes_leave_no_trace()
            print(name, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def states_passed():
    """Names that passed; a process each, since some states cannot be undone by hand."""
    command = [sys.executable, "-c", SCRIPT, json.dumps(STATES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("name", STATES)
def test_flags_come_back_from_every_state(name, states_passed):
    """fp32 and tf32 in both orders, left through an exception, and nested."""
    assert name in states_passed.stdout.split(), states_passed.stderr


def test_mixing_the_apis_is_what_pytorch_refuses():
    """Why the scope enters through the older flags."""
    script = (
        "import torch\n"
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "torch.backends.cuda.matmul.allow_tf32"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "mix of the legacy and new APIs" in done.stderr

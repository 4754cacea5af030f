"""Entry point: runs a command and turns every outcome into an exit code and at most one line.

    0  ok
    1  a check failed: parity, accuracy or a benchmark's correctness gate
    2  bad input or usage
    3  something that is needed is missing on this machine
    4  a defect of fastswin

Typer and rich are the extra ``cli``; without them the command says so and nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from fastswin.cli import exit_codes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit the process with its code.

    Args:
        arguments: the command line without the program's name; None takes ``sys.argv``.
    """
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors are one line on stderr."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fastswin: the command line needs {' and '.join(missing)}: "
            "pip install 'fastswin[cli]'",
            file=sys.stderr,
        )
        return exit_codes.BAD_INPUT
    debug = "--debug" in arguments or os.environ.get("FASTSWIN_DEBUG", "0") not in ("", "0")
    from fastswin.cli.app import app

    try:
        with warnings.catch_warnings():
            if not debug:  # libraries' advice to programmers would bury the one line of an error
                warnings.simplefilter("ignore")
            code = _command(app).main(
                [a for a in arguments if a != "--debug"] or ["--help"],
                prog_name="fastswin",
                standalone_mode=False,
            )
        return code if isinstance(code, int) else exit_codes.OK
    except KeyboardInterrupt:
        print("fastswin: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    except Exception as error:
        if debug:
            traceback.print_exc()
        code, line = exit_codes.explain(error)
        print(f"fastswin: {line}", file=sys.stderr)
        return code


def _command(app):  # type: ignore[no-untyped-def]
    import typer

    return typer.main.get_command(app)


if __name__ == "__main__":
    main()

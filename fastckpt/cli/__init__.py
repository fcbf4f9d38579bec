"""The command line: `fastckpt ls`, `inspect`, `diff`, `convert`, `verify`, `repair` and others.

The module must not know how any of them does its work.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pickle import UnpicklingError

import fastckpt
from fastckpt.cli import advise, bench, convert, diff, doctor, inspect, ls, repair, report, verify
from fastckpt.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, of sys.argv by default.

    Returns:
        The exit status: 0; 1 if something is damaged or could not be done, if `diff` found
            differences or `repair` debris; 3 if `verify` could not read something; 130 if
            interrupted. Wrong arguments end the process with status 2.
    """
    parser = argparse.ArgumentParser(
        prog="fastckpt", description="Asynchronous, durable checkpoints for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fastckpt {fastckpt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (ls, inspect, diff, convert, verify, repair, report, doctor, advise, bench):
        command.add_arguments(commands)
    with suppress(ImportError):  # completion in a shell is there if argcomplete is
        importlib.import_module("argcomplete").autocomplete(parser)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has seen enough, as with head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, ValueError, OSError, UnpicklingError, NotImplementedError) as error:
        if getattr(parsed, "json", False):  # which promises one object, whatever happens
            print(json.dumps({"error": str(error)}, indent=1))
        print(f"fastckpt {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

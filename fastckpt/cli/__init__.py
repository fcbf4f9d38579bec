"""The command line: what each command takes, and which exit status it ends with.

Responsible for the arguments of `fastckpt advise`, `verify` and `doctor`. It must not know how any
of them does its work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import fastckpt
from fastckpt.cli import advise, doctor, verify
from fastckpt.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; default: that of sys.argv.

    Returns:
        The exit status: 0, or 1 if something is damaged or could not be done. A wrong argument ends
            the process with status 2, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="fastckpt", description="Asynchronous, durable checkpoints for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fastckpt {fastckpt.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (advise, verify, doctor):
        command.add_arguments(commands)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read this has seen enough, as with head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CheckpointError, ValueError, OSError) as error:
        print(f"fastckpt {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

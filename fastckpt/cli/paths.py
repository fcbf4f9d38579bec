"""Path arguments of commands: a wrong one is an error of usage."""

from __future__ import annotations

import argparse

from fastckpt.arguments.checks import check_path


def path_argument(text: str) -> str:
    """Returns a checked path for argparse, which ends the process with status 2 if it is wrong."""
    try:
        return check_path("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None

"""The texts that commands take and print: path arguments, names of tensors and classes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fastckpt.arguments.checks import check_path
from fastckpt.arguments.near_names import listed


def path_argument(text: str) -> str:
    """Returns a checked path for argparse, which ends the process with status 2 if it is wrong."""
    try:
        return check_path("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def shown_name(name: str) -> str:
    """Returns a name from a file for a terminal: what could steer the terminal is escaped."""
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def shown_others(others: Mapping[str, int]) -> str:
    """Returns what a checkpoint holds beside its tensors in words; "" if that is nothing."""
    if not others:
        return ""
    kinds = (f"{count} of {shown_name(name)}" for name, count in others.items())
    return f"not looked into: {listed(kinds)}"

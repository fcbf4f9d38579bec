"""The command line: `fastckpt ls`, `inspect`, `diff`, `convert`, `verify`, `repair` and others."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from pickle import UnpicklingError
from typing import Any

import fastckpt
from fastckpt.cli.parser import make_parser
from fastckpt.cli.shared_arguments import shown_text
from fastckpt.errors import CheckpointError, as_url

_FAILURES = (
    CheckpointError,
    ValueError,
    OSError,
    MemoryError,
    UnpicklingError,
    NotImplementedError,
)


class _Shown:
    """A stream whose texts have URLs as users know them, and nothing that could steer a terminal:
    names in files and directories are anybody's.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return int(self._stream.write(shown_text(as_url(text))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, of sys.argv by default; `doctor` if there is none.

    Returns:
        The exit status: 0; 1 if something is damaged or could not be done, if `diff` found
            differences or `repair` debris; 3 if `verify` could not read something, 4 if something
            has no checksums; 130 if interrupted. Wrong arguments end the process with status 2.
    """
    if sys.stdout is None:  # as with `>&-`: what is printed is for nobody, the status counts
        # To the end, so that no other file is descriptor 1.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # which may be ASCII, where names need not be
        with suppress(OSError):  # it is done, and then asks where in a file stdout is: in none now
            sys.stdout.reconfigure(errors="backslashreplace")
    parser = make_parser(fastckpt.__version__)
    with suppress(ImportError):  # completion in a shell is there if argcomplete is
        importlib.import_module("argcomplete").autocomplete(parser)
    argv = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(argv or ["doctor"])
    try:
        # Only now, since most import torch.
        with redirect_stdout(_Shown(sys.stdout)):
            status: int = importlib.import_module(f"{__name__}.{parsed.command}").run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has seen enough, as with head(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _FAILURES as error:
        message = str(error) or "there is not enough memory"  # which MemoryError says by its name
        if getattr(parsed, "json", False):  # which promises one object, whatever happens
            with suppress(OSError):  # as the error may be that nothing can be written there
                print(json.dumps({"error": message}, indent=1))
        print(shown_text(as_url(f"fastckpt {parsed.command}: {message}")), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130

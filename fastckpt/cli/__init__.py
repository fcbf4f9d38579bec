"""The command line: `fastckpt ls`, `inspect`, `diff`, `convert`, `verify`, `repair` and others."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
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


_NOT_WRITTEN = 5  # the exit status; 1 would tell of a damaged checkpoint


class _OutputError(Exception):
    """Standard output cannot be written. The cause is the OSError."""


class _Shown:
    """A stream that prints internal paths of objects as URLs, and escapes control characters,
    because names in files and directories are not trusted.

    Raises:
        _OutputError: the stream cannot be written.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _output():
            return int(self._stream.write(shown_text(as_url(text))))

    def flush(self) -> None:
        with _output():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _output() -> Iterator[None]:
    """Distinguishes errors of standard output from errors of the checkpoints that are read."""
    try:
        yield
    except OSError as error:
        raise _OutputError(f"the output cannot be written: {error}") from error


def _end_output() -> bool:
    """Writes what the streams still hold, or drops it: at its exit, Python would fail to write
    it. Returns whether everything was written.
    """
    is_whole = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            is_whole = False
    return is_whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command with its arguments, by default those in sys.argv; runs `doctor` if there are
    none.

    Returns:
        The exit status: 0 for success; 1 if a checkpoint is damaged or the command failed, if
        `diff` found differences, or if `repair` left debris; 3 if `verify` could not read a file, 4
        if a file has no checksums; 5 if standard output cannot be written; 130 if the command was
        interrupted. Invalid arguments end the process with status 2.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as with `>&-`: only the status matters
            # Open until the end, so that no other file gets descriptor 1 or 2.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # may be ASCII, unlike names
        with suppress(OSError):  # it takes effect before tell() fails
            sys.stdout.reconfigure(errors="backslashreplace")
    parser = make_parser(fastckpt.__version__)
    with suppress(ImportError):  # shell completion needs argcomplete
        importlib.import_module("argcomplete").autocomplete(parser)
    argv = sys.argv[1:] if arguments is None else arguments
    try:
        parsed = parser.parse_args(argv or ["doctor"])
    except SystemExit as end:  # --help, --version, or invalid arguments
        if not _end_output() and not end.code:
            return _NOT_WRITTEN
        raise
    try:
        # Imported only now, because most commands import torch.
        with redirect_stdout(_Shown(sys.stdout)) as output:
            status: int = importlib.import_module(f"{__name__}.{parsed.command}").run(parsed)
            output.flush()
        return status
    except _OutputError as error:
        if not isinstance(error.__cause__, BrokenPipeError):  # of a reader like head(1)
            _print_error(parsed.command, str(error))
        _end_output()
        return _NOT_WRITTEN
    except _FAILURES as error:
        message = str(error) or "there is not enough memory"  # MemoryError has no text
        if getattr(parsed, "json", False):  # --json always prints one object
            with suppress(OSError):  # the status tells of the more important error
                print(json.dumps({"error": message}, indent=1))
        _print_error(parsed.command, message)
        _end_output()
        return 1
    except KeyboardInterrupt:
        _end_output()
        return 130


def _print_error(command: str, message: str) -> None:
    with suppress(OSError):  # stderr may be on the same full disk
        print(shown_text(as_url(f"fastckpt {command}: {message}")), file=sys.stderr)

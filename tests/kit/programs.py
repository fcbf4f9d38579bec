"""Programs in a process of their own, and what they save."""

from __future__ import annotations

import dis
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

import torch

import fastckpt
from tests.kit import interpreters
from tests.kit.paths import ROOT

LIMIT_S = 200.0
WATCHED = ("pipeline.py", "life.py", "handle.py", "latch.py", "threading.py", "_base.py")
# Behind these the interpreter looks for signals, and nowhere else.
LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_BACKWARD")
program = interpreters.Program


def run_python(
    program: str,
    *arguments: object,
    variables: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
    returncode: int = 0,
    limit_s: float = LIMIT_S,
    started: bool = False,
    imports: str = "",
    frees: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in an interpreter of its own: a forked one, or one that is started.

    A program that takes longer than `limit_s` is killed with all its children and fails; so does
    one that ends with another code than `returncode`. A forked one may have imported a module, and
    frees what it has where a test is about its end (see interpreters.run()).
    """
    if not started and not options:
        result = interpreters.run(
            program,
            *arguments,
            variables=variables,
            imports=imports,
            timeout=limit_s,
            frees=frees,
        )
    else:
        result = subprocess.run(
            [sys.executable, *options, "-c", program, *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (variables or {}),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    assert result.returncode == returncode, f"{result.returncode}: {result.stderr}{result.stdout}"
    return result


class Shards(torch.utils.data.Dataset[int]):
    """A data set whose items are checkpoints that the worker loads, and copies with a save."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        loaded = fastckpt.load(f"{self.folder}/{index % 3}.pt")
        fastckpt.save(loaded, f"{self.folder}/copy-{index}.pt")
        return int(loaded.numel())


def save_and_return(path: str) -> None:
    """Body of a worker process that does not wait for its save."""
    fastckpt.save(torch.ones(5 << 20), path)


class Signalled(Exception):
    """What the handler raises."""


class Interruption:
    """Raises at the n-th moment, within the body, at which a signal handler could have raised.

    Args:
        raised: what the handler raises.
        by: the signal whose handler, the program's own, is to raise instead.
        watched: the ends of the files' names of which the moments count.

    Attributes:
        moments: how many there were.
    """

    def __init__(
        self,
        at: int,
        raised: type[BaseException] = Signalled,
        watched: str | tuple[str, ...] = WATCHED,
        by: signal.Signals | None = None,
    ) -> None:
        self._at, self._raised, self._watched, self._by = at, raised, watched, by
        self._last: dict[FrameType, str] = {}
        self.moments = 0

    def __enter__(self) -> Interruption:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces those of no frame without
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._last.clear()

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(self._watched):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._traced

    def _traced(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "opcode":
            last = self._last.get(frame, "")
            self._last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(LOOKS):
                self.moments += 1
                if self.moments == self._at:
                    if self._by is None:
                        raise self._raised
                    signal.raise_signal(self._by)
        elif event == "exception":  # a call that fails is followed by no look
            self._last.pop(frame, None)
        return self._traced


def told(process: interpreters.Program) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: interpreters.Program, text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{text}\n")
    process.stdin.flush()

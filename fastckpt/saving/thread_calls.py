"""The calls that Python threads execute at one moment, and whether all of them have ended.

torch increments a version counter at the end of an in-place operation. So version counters show all
changes that began before a moment only after all calls of that moment have ended. If a save checked
only counters and samples, it could commit a tensor that a long operation was changing during the
copy. There is no other method to detect this, which justifies the length of this module. The
extension reads the frames.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
import time
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from fastckpt import _engine

# If a thread is at the same instruction as at the beginning of the save and has used hardly any CPU
# time, it has been in one call since then, such as a server that waits in C. It gets this long to
# leave the call. A thread that has used CPU time may be at the same instruction for another tensor,
# in a loop over tensors, so it must be seen elsewhere.
STAYED_S = 0.05
_IDLE_S, _IDLE_SHARE = 0.0002, 0.001  # negligible CPU time, and its share of the elapsed time
_MAIN_ASKED_S = 0.01
# A thread of this library checks at growing intervals; training is not affected.
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.0002, 0.005

# Functions with these names wait, or move bytes between files and memory. No operation of torch
# that changes a tensor has one of these names (tests/saving/test_step_fence.py).
_NAMES = """
__enter__ acquire wait join get sleep pause sigwait sigwaitinfo sigtimedwait waitpid waitid
select poll epoll kqueue input accept _accept connect recv recvfrom recvmsg recv_into
recv_multipart recv_bytes send sendall sendmsg sendfile read readinto readline readlines
pread preadv write writelines pwrite pwritev copy_file_range flush fsync fdatasync sync
syncfs fallocate posix_fallocate ftruncate truncate open close rename replace unlink
rmdir link flock lockf ioctl
wait_staged wait_queued wait_written prefault
synchronize _cuda_synchronize barrier monitored_barrier
run_forever run_until_complete mainloop exec exec_
"""  # of Python and its libraries, of the engine, of devices and groups, of event loops in C
WAITING = frozenset(_NAMES.split())
# The modules in which this library's threads call the kernel and the engine. They do not change
# tensors.
_OWN = """
engine/codec engine/staging engine/transfer saving/image_file
storage/atomic storage/file_system storage/lustre storage/policies
"""
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
OWN_FILES = frozenset(os.path.join(_PACKAGE, f"{name}.py") for name in _OWN.split())

# Instructions that belong to a call but do not load the function. LOAD_CONST is one of them, since
# the names of keyword arguments are a constant from Python 3.13 on.
_OF_CALLS = ("PUSH_NULL", "KW_NAMES", "LOAD_CONST")

Stack = list[tuple[FrameType, int]]  # frames with their current instruction, the innermost first


class ThreadPosition(NamedTuple):
    """A thread's position, without a reference to its frame.

    Attributes:
        place: the ids of the innermost frame and of its code, and the instruction.
        cpu_s: the CPU time that the thread has used, or None if unknown.
        at_s: the time of the observation, by time.monotonic().
    """

    place: tuple[int, int, int]
    cpu_s: float | None
    at_s: float

    def has_stayed(self, before: ThreadPosition) -> bool:
        """Whether the thread appears to have been in one call since an earlier position."""
        if self.place != before.place:
            return False
        if self.cpu_s is None or before.cpu_s is None:
            return True
        used_s, passed_s = self.cpu_s - before.cpu_s, self.at_s - before.at_s
        return used_s <= _IDLE_S + _IDLE_SHARE * passed_s


def positions() -> dict[int, ThreadPosition]:
    """Returns the positions of all other threads, by their idents."""
    return _positions(_engine.thread_stacks())


def _positions(stacks: dict[int, Stack]) -> dict[int, ThreadPosition]:
    seconds, now_s = _engine.thread_seconds(), time.monotonic()
    result = {}
    for ident, stack in stacks.items():
        frame, instruction = stack[0]
        place = id(frame), id(frame.f_code), instruction
        result[ident] = ThreadPosition(place, seconds.get(ident), now_s)
    return result


class ThreadCalls:
    """The current calls of all threads except the caller's, at the time of construction.

    The GIL makes the snapshot consistent, because a thread that does not hold the GIL is in a call
    that has released it, or between two instructions. If the thread is at another position
    when it is checked again, it has left the call, or the call has continued with Python code. In
    both cases the thread's operation has ended.

    Args:
        before: positions() at the beginning of the save. For threads that have been in one call
            since then, wait() waits at most STAYED_S.
    """

    def __init__(self, before: dict[int, ThreadPosition]) -> None:
        self._pending: dict[int, _Call] = {}
        self._stayed: set[int] = set()
        stacks = _engine.thread_stacks()
        for ident, position in _positions(stacks).items():
            call = _Call.of(stacks[ident])
            if call.is_top and _waits(call.frame.f_code, call.instruction):
                continue
            self._pending[ident] = call
            if ident in before and position.has_stayed(before[ident]):
                self._stayed.add(ident)
        self._begin_s = time.monotonic()
        self._turns: int | None = None  # the main thread's turns at the request for one more

    def have_ended(self) -> bool:
        if self._pending:
            stacks = _engine.thread_stacks()
            for ident, call in list(self._pending.items()):
                if not call.is_running(stacks.get(ident, [])):
                    del self._pending[ident]
        since_s = time.monotonic() - self._begin_s
        if self._pending and since_s > STAYED_S:
            # A server's thread may have received a message since the save began, and may now wait
            # for the next one in a function of any name.
            for ident in [*self._stayed, *_engine.threads_waiting_for_input()]:
                self._pending.pop(ident, None)
        main = threading.main_thread().ident or 0
        if main in self._pending and self._pending[main].is_top and since_s > _MAIN_ASKED_S:
            # A loop over one call makes progress, but is always seen in that call. The main thread
            # takes a turn between instructions, so a turn shows that the call has ended.
            turns = _engine.main_thread_turns()
            if self._turns is None:
                self._turns = turns if _engine.ask_main_thread() else None
            elif turns != self._turns:
                del self._pending[main]
        return not self._pending

    def wait(self, timeout_s: float) -> bool:
        """Waits at most timeout_s; returns whether all calls have ended."""
        deadline_s, pause_s = time.monotonic() + timeout_s, _PAUSE_MIN_S
        while not self.have_ended():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _PAUSE_MAX_S)
        return True

    def text(self) -> str:
        """Returns the name of a thread that has not left its call, with file and line."""
        ident, call = next(iter(self._pending.items()))
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        code = call.frame.f_code
        place = f"{code.co_filename}:{call.frame.f_lineno}, in {code.co_name}"
        return f"thread {names.get(ident, str(ident))!r} at {place}"

    def forget(self) -> None:
        """Releases the frames, which keep their functions' local variables alive."""
        self._pending.clear()


class _Call(NamedTuple):
    """A frame of a thread, its current instruction, and whether the frame was the innermost.

    The reference to the frame keeps another frame from getting the same id.
    """

    frame: FrameType
    instruction: int
    is_top: bool

    @classmethod
    def of(cls, stack: Stack) -> _Call:
        """Returns the current call of a thread with these frames.

        An operation of torch may have a kernel in Python (a dispatch mode, a tensor subclass, a
        library), and torch counts the change after the kernel returns. So this returns the
        outermost operation.
        """
        for depth in range(len(stack) - 1, -1, -1):
            frame, instruction = stack[depth]
            if frame.f_code.co_name == "__torch_dispatch__":
                if depth + 1 < len(stack):
                    frame, instruction = stack[depth + 1]
                else:
                    instruction = -1
                return cls(frame, instruction, False)
            if depth and frame.f_code.co_filename == torch._ops.__file__:
                return cls(frame, instruction, False)
        return cls(*stack[0], True)

    def is_running(self, stack: Stack) -> bool:
        """Whether a thread with these frames is still in the call."""
        for frame, instruction in stack[:1] if self.is_top else stack:
            if frame is self.frame:
                return self.instruction in (-1, instruction)
        return False


@lru_cache(512)
def _waits(code: CodeType, instruction: int) -> bool:
    """Whether an instruction calls a function that may take long but changes no tensor."""
    return code.co_filename in OWN_FILES or _callee(code, instruction) in WAITING


def _callee(code: CodeType, instruction: int) -> str | None:
    """Returns the name of the function that an instruction calls, or None if unknown."""
    until = [each for each in dis.get_instructions(code) if each.offset <= instruction]
    call = until.pop()
    if call.opname in ("BEFORE_WITH", "SETUP_WITH"):
        return "__enter__"
    if until and until[-1].opname == "LOAD_SPECIAL":
        return str(until[-1].argval if isinstance(until[-1].argval, str) else until[-1].argrepr)
    if not call.opname.startswith(("CALL", "PRECALL")):
        return None
    if sys.version_info < (3, 11):
        return _callee_on_stack(until, call)
    # The name in "a.b(x)" is loaded by the longest instruction, "a.b", that begins where the call
    # does. The function called in "a.b(x)(y)" has no name.
    at, loader, end = call.positions, None, (-1, -1)
    if at is None or at.lineno is None:
        return None
    for op in until:
        of = op.positions
        if (
            of is None
            or op.opname in _OF_CALLS
            or (of.lineno, of.col_offset) != (at.lineno, at.col_offset)
        ):
            continue
        op_end = of.end_lineno or 0, of.end_col_offset or 0
        if end < op_end < (at.end_lineno or 0, at.end_col_offset or 0):
            loader, end = op, op_end
    return _name(loader)


def _name(op: dis.Instruction | None) -> str | None:
    """Returns the name of the object that an instruction loads, if it has one."""
    named = op is not None and op.opname.startswith("LOAD_") and isinstance(op.argval, str)
    return op.argval if op is not None and named else None


def _callee_on_stack(until: list[dis.Instruction], call: dis.Instruction) -> str | None:
    """Like _callee(), but by stack effects: before Python 3.11 instructions have no columns."""
    above = call.arg or 0
    if call.opname == "CALL_FUNCTION_KW":
        above += 1  # the names of the last arguments
    elif call.opname == "CALL_FUNCTION_EX":
        above = 1 + (above & 1)  # a tuple, and a dict if there is one
    after = call
    for op in reversed(until):
        if after.is_jump_target or op.opcode in dis.hasjrel or op.opcode in dis.hasjabs:
            return None  # a condition decides which function it is
        if above == 0:
            return _name(op)
        above -= dis.stack_effect(op.opcode, op.arg)
        after = op
    return None

"""The closed set of errors that fastckpt raises for faults outside of the program.

Each message names the failure, the path, tensor or record, and the remedy. A wrong argument raises
TypeError or ValueError instead; a bug of fastckpt raises AssertionError. The module also has
helpers that replace one error by another. It imports no other module of fastckpt.
"""

from __future__ import annotations

import copy
import errno as errno_names
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

AnyError = TypeVar("AnyError", bound=BaseException)
P = ParamSpec("P")


# The path that stands for a URL (arguments/urls.py).
_MOUNTED = re.compile(r"/(s3|gs|az):([0-9a-f]{6})?(-\d+)?/(?=[^/])")


def as_url(text: str) -> str:
    """Replaces each path that stands for a URL in a text by the URL."""
    return _MOUNTED.sub(r"\1://", text) if ":" in text else text


def ensure(condition: bool, text: str) -> None:
    """Raises AssertionError with this text unless the condition holds, even under `python -O`. It
    is used for conditions that only a bug can break and on which the correctness of committed or
    returned bytes depends.
    """
    if not condition:
        raise AssertionError(text)


class Telling:
    """A context manager that calls a function with the error that its body raises, if any."""

    def __init__(self, tell: Callable[[BaseException], object]) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self._tell(error)


def telling(tell: Callable[Concatenate[BaseException, P], None]) -> Callable[P, Telling]:
    """Makes a context manager from a function that gets the body's error as its first argument and
    may raise a more helpful error in its place. If the function returns, the body's error
    propagates.

    A generator under contextlib.contextmanager must not do this: since Python 3.12 the body's error
    is then in a reference cycle with all frames above it, and keeps their objects alive until the
    collector runs.
    """

    @wraps(tell)
    def made(*args: P.args, **kwargs: P.kwargs) -> Telling:
        return Telling(lambda error: tell(error, *args, **kwargs))

    return made


def _rendered(record: logging.LogRecord) -> bool:
    """Formats a log record at once if its arguments include errors, because a handler that keeps
    the record would keep the errors and, through their frames, the memory of a save. Shows URLs in
    place of the paths that stand for them. Always returns True.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(as_url(a) if isinstance(a, str) else a for a in record.args)
    if isinstance(record.args, tuple) and any(isinstance(a, BaseException) for a in record.args):
        record.msg, record.args = record.getMessage(), ()
    return True


logging.getLogger("fastckpt").addFilter(_rendered)


def free_locals(error: BaseException) -> None:
    """Clears the local variables of the ended calls in an error's tracebacks, for an error that is
    kept: its lines and messages do not need the variables, which may also refer to the error.
    """
    chain: list[BaseException | None] = [error]
    while (last := chain[-1]) is not None:
        traceback.clear_frames(last.__traceback__)
        following = last.__cause__ or last.__context__
        chain.append(None if following in chain else following)


class CheckpointError(RuntimeError):
    """The base of all errors below. It is a RuntimeError because torch.save raises RuntimeError.

    Attributes:
        visible: the state of the checkpoint after a failed save. False: nothing was committed, and
            the previous checkpoint is unchanged. True: the checkpoint is complete under its final
            name, but may not survive a crash of the machine; or the commit is in doubt. Keep older
            checkpoints until a later save has succeeded; the later save may use the same step or
            path.
        in_doubt: whether this rank could not find out if the first rank has committed; if so,
            `visible` is also true. Once no rank is saving, latest() or a load shows the outcome.
    """

    visible = False
    in_doubt = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(as_url(each) if isinstance(each, str) else each for each in args))

    def reword(self, text: str) -> None:
        """Replaces the message of this error and keeps its attributes."""
        self.args = (as_url(text),)


class StorageError(CheckpointError, OSError):
    """The file system refused an operation. Nothing was committed unless `visible` is true.

    Attributes:
        op: the operation that failed: "open", "allocate", "write", "sync", "rename", ...
        path: the file or directory that it failed for.
        offset: the byte offset in the file; None for an operation without one.
        errno: the error number, as in OSError.
        detail: further information as a text, or "".
        visible: as CheckpointError's.
    """

    detail: str

    def __init__(
        self,
        op: str,
        path: str,
        errno: int,
        offset: int | None = None,
        detail: str = "",
        visible: bool = False,
    ) -> None:
        handled = sys.exc_info()[1]  # which this one takes the place of
        if isinstance(handled, StorageError) and handled.errno == errno:
            detail = detail or handled.detail
        self.visible = visible
        self.op = op
        self.path = as_url(path)
        self.offset = offset
        self.detail = detail
        where = "" if offset is None else f" at offset {offset}"
        name = errno_names.errorcode.get(errno, str(errno))
        self._text = f"{op} of {path!r}{where} failed: {os.strerror(errno)} [{name}]"
        hint = _HINTS.get(errno)
        above = os.path.dirname(path)
        if errno == errno_names.EACCES:
            hint = f"check the permissions of {_refusing(path)}, and whether a ticket expired"
        is_url = self.path != path
        if op == "open" and errno == errno_names.ENOENT and not is_url and not os.path.isdir(above):
            hint = f"Parent directory {above} does not exist"
        if hint is not None:
            self._text += f"; {hint}"
        if detail:
            self._text += f"; {detail}"
        self._text = as_url(self._text)
        OSError.__init__(self, errno, self._text)
        self.filename = self.path

    def __str__(self) -> str:
        return self._text

    def reword(self, text: str) -> None:
        self._text = text = as_url(text)
        self.args = (self.errno, text)

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.op, self.path, self.errno, self.offset, self.detail, self.visible)
        return type(self), fields, {"_text": self._text, "in_doubt": self.in_doubt}


_HINTS = {
    errno_names.ENOSPC: "remove files that are not needed there",
    errno_names.EDQUOT: "the quota is used up: remove files, or have it raised",
    errno_names.EFBIG: "the file size limit (ulimit -f, or the file system's) is too small",
    errno_names.EROFS: "the file system is mounted read-only",
    errno_names.EPERM: "check the file's attributes and owner, and whether a ticket expired",
    errno_names.EKEYREJECTED: (
        "the store rejects the credentials, or they do not permit this: renew them"
    ),
    errno_names.EKEYEXPIRED: "a ticket expired: renew it (kinit)",
    errno_names.ESTALE: "the file was replaced, its server restarted, or a ticket expired",
    errno_names.EISDIR: "give the path of a file",
    errno_names.ENOMEM: "free memory, or raise the limit on address space (ulimit -v)",
    errno_names.ETIMEDOUT: "check that the server or the disk responds",
    errno_names.ENODATA: "the file became shorter while it was being read",
}


def _refusing(path: str) -> str:
    """Returns a description of the file or directory that denies this process access to a path, as
    far as this process can find it.
    """

    def allows(place: str, mode: int) -> bool:
        return os.access(place, mode, effective_ids=True)

    above = os.path.dirname(os.path.abspath(path))
    first = above
    while not os.path.lexists(first) and first != os.path.dirname(first):
        first = os.path.dirname(first)  # the first directory that can be seen from here
    if not allows(first, os.X_OK):
        return f"the directory {first!r}"
    if os.path.lexists(path) and not allows(path, os.R_OK):
        return "this file" if not os.path.isdir(path) else "this directory"
    if not allows(first, os.W_OK):
        return f"the directory {first!r}"
    return "this path and of its directory"


class CorruptCheckpoint(CheckpointError):
    """Bytes of a file differ from the bytes that were written. No damaged byte was returned."""


class TruncatedFile(CorruptCheckpoint, EOFError):
    """A file is empty, or a pickle in it was cut off. It is also torch.load's EOFError."""


class NoPath(StorageError, FileNotFoundError):
    """A path is "", or a URL of no object. It is also a FileNotFoundError, like torch.load's."""


class IncompatibleCheckpoint(CheckpointError):
    """The checkpoint is intact but cannot be used here: either another version of fastckpt wrote it
    in a format that this version does not support, or the state to be restored has different keys,
    shapes or types.
    """


class Vanished(CheckpointError):
    """A listed path no longer exists, so the directory has to be listed again."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path!r} was removed after it was listed")
        self.path = path


class StagingConflict(CheckpointError):
    """A tensor was changed while a step-fence save was still copying it. Nothing was committed."""


class PeerFailed(CheckpointError):
    """Another rank failed or is missing. No rank committed anything unless `visible` is true.

    Attributes:
        ranks: the ranks that failed or are missing, as far as known.
        visible, in_doubt: the values of the failed rank's own error (see CheckpointError).
    """

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        visible: bool = False,
        in_doubt: bool = False,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.visible = visible
        self.in_doubt = in_doubt

    def __reduce__(self) -> tuple[type[PeerFailed], tuple[str, tuple[int, ...], bool, bool]]:
        return type(self), (str(self), self.ranks, self.visible, self.in_doubt)


class _NamesRanks(Exception):
    """Base of the errors that carry the ranks on which they arose."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[_NamesRanks], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class SaveCancelled(_NamesRanks, CheckpointError):
    """SaveHandle.cancel() was called, on this rank or another one. No rank committed anything.

    Attributes:
        ranks: the rank that was the first to cancel.
    """


class RootInUse(_NamesRanks, CheckpointError):
    """Another job saves to the same root, to the same directory on a node, or to the same directory
    of a framework's checkpoints, or has taken it over from this job. Every rank raises this;
    nothing was committed. The message names that job and the remedy.

    Attributes:
        ranks: the rank that detected the other job.
    """


class RanksDisagree(CheckpointError):
    """Ranks that should hold the same state or file do not. Every rank raises this with the same
    message, which names the tensor and the ranks; nothing was committed.
    """


class DeviceError(CheckpointError):
    """A GPU or its driver refused a request; the message quotes it. Nothing was committed."""


class BackendUnavailable(CheckpointError):
    """The requested backend does not work on this machine. The message has the reason."""


IN_DOUBT = "may or may not be visible"


def mark_visible(error: BaseException, in_doubt: bool) -> None:
    """Marks a save's error, of any class: its checkpoint is visible or in doubt."""
    vars(error).update(visible=True, in_doubt=in_doubt)
    if in_doubt and isinstance(error, CheckpointError):
        error.reword(f"{error}; the checkpoint {IN_DOUBT}")


def is_visible(error: BaseException | None) -> bool:
    """Returns whether a save that failed with this error has, or may have, made its checkpoint
    visible. If so, neither the files of this save nor older checkpoints may be removed.
    """
    return bool(getattr(error, "visible", False))


def fate(error: BaseException | None, otherwise: str = "was not committed") -> str:
    """Describes the fate of a checkpoint whose save failed with this error, as the end of a
    sentence that begins with the checkpoint's name.
    """
    if getattr(error, "in_doubt", False):
        return IN_DOUBT
    return "is visible, but perhaps not durable" if is_visible(error) else otherwise


def retold(error: AnyError, text: str) -> AnyError:
    """Returns a copy of an error with another message and the original as its cause, for a call
    that did not fail itself. If the class does not permit another message, returns the error
    itself.
    """
    try:
        result = copy.copy(error)
        if isinstance(result, CheckpointError):
            result.reword(text)
        elif isinstance(result, OSError) and result.errno is not None:
            result = type(result)(result.errno, text)  # changing the args does not change its text
        else:
            result.args = (text,)
        if text not in str(result):  # the class does not make its text of its arguments
            return error
    except Exception:  # the class does not let its errors be copied: better the old text than none
        return error
    result.__cause__ = error
    return result

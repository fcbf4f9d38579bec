"""Renames that a server does, or does not do, and answers by an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastckpt.storage import file_system


@pytest.fixture
def names(disk: Path) -> tuple[str, str]:
    """Two directories."""
    for name in ("new", "old"):
        (disk / name).mkdir()
        (disk / name / "holds").write_text(name)
    return str(disk / "new"), str(disk / "old")


def content(path: str) -> str:
    return Path(path, "holds").read_text()


def answered_by(number: int, *, is_done: bool) -> Callable[..., None]:
    """Returns a rename whose answer is this error."""
    rename = os.rename

    def answered(*names: str) -> None:
        if is_done:
            rename(*names)
        raise OSError(number, os.strerror(number))

    return answered


def test_what_was_done_is_no_error(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = names
    monkeypatch.setattr(os, "rename", answered_by(errno.EIO, is_done=True))
    file_system.rename(new, f"{old}/inner")
    assert content(f"{old}/inner") == "new"


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_what_was_not_done_is_that_error(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "rename", answered_by(number, is_done=False))
    with pytest.raises(OSError, match=os.strerror(number)):
        file_system.rename(names[0], f"{names[1]}/inner")


@pytest.mark.parametrize("is_done", [True, False])
def test_another_process_may_have_been_faster(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    monkeypatch.setattr(os, "rename", answered_by(errno.ENOENT, is_done=is_done))
    with pytest.raises(FileNotFoundError):
        file_system.rename(names[0], f"{names[1]}/inner")


def test_what_cannot_be_seen_is_in_doubt(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rename", answered_by(errno.EIO, is_done=True))
    monkeypatch.setattr(os, "lstat", answered_by(errno.EIO, is_done=False))
    with pytest.raises(TimeoutError):
        file_system.rename(names[0], f"{names[1]}/inner")


@pytest.mark.parametrize("is_done", [True, False])
def test_an_exchange_is_seen_too(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    new, old = names

    class Libc:
        """Answers by EIO."""

        def __init__(self, *_: object, **__: object) -> None: ...

        def renameat2(self, *_: object) -> int:
            if is_done:
                os.rename(new, f"{old}-aside")
                os.rename(old, new)
                os.rename(f"{old}-aside", old)
            file_system.ctypes.set_errno(errno.EIO)
            return -1

    monkeypatch.setattr(file_system.ctypes, "CDLL", Libc)
    if is_done:
        file_system.exchange(new, old)
        assert (content(new), content(old)) == ("old", "new")
    else:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file_system.exchange(new, old)


def test_names_are_exchanged(names: tuple[str, str]) -> None:
    file_system.exchange(*names)
    assert (content(names[0]), content(names[1])) == ("old", "new")

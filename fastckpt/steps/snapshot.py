"""Snapshot: the bytes of a rank's shard in the step that it saved last, from which the next step is
stored as a difference.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import NamedTuple

from fastckpt.arguments.quantities import shown_size
from fastckpt.errors import CheckpointError
from fastckpt.formats.shard_index import Delta, ShardIndex
from fastckpt.plan.image import Image
from fastckpt.saving.handle import InnerHandle

_SHARE_MAX = 0.5  # a difference that takes more of a shard than this is not worth a chain


class _Last(NamedTuple):
    """The last step: its save, and the index of the shard."""

    handle: InnerHandle
    shard: ShardIndex


class Snapshot:
    """The snapshot of one rank. Saves that use it follow each other: each begins when the one
    before has ended.

    Args:
        full_every: the first of so many steps is stored in full.

    Attributes:
        nbytes: the host memory that this takes, in bytes.
        why_full: why the shard of the last step was stored in full; "" if it was not.
    """

    def __init__(self, full_every: int) -> None:
        self._full_every = full_every
        self._deltas = 0  # since the last full shard
        self._memory: mmap.mmap | None = None
        self._last: _Last | None = None
        self._has_begun = False
        self._base: ShardIndex | None = None
        self.why_full = ""

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def clear(self) -> None:
        """Frees the memory. The next step is stored in full."""
        self._last = self._base = self._memory = None

    def begin(self, image: Image, pieces: tuple[object, ...]) -> bool:
        """Begins a save of an image with these pieces. Has its difference staged, and returns True,
        if the last step is committed, the layout is the same and a full shard is not due.
        """
        last, self._last = self._last, None  # until end(), the memory is of no known step
        self.why_full, self._has_begun = self._reason(last, image.body_nbytes, pieces), True
        if last is None or self.why_full:
            self._base, self._deltas = None, 0
            self._memory = self._allocated(image.body_nbytes)
        else:
            self._base, self._deltas = last.shard, self._deltas + 1
        if self._memory is not None:
            image.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            image.sources.append(self._memory)
        return self._base is not None

    def _allocated(self, nbytes: int) -> mmap.mmap | None:
        """Returns the memory for a copy of the shard; None if no step will be a difference."""
        if self._full_every == 1 or nbytes == 0:
            return None
        try:
            return mmap.mmap(-1, nbytes)
        except OSError as error:
            raise CheckpointError(
                f"{shown_size(nbytes)} of host memory for a copy of the published version cannot "
                f"be had: {error}; full_every=1 needs none"
            ) from error

    def _reason(self, last: _Last | None, nbytes: int, pieces: tuple[object, ...]) -> str:
        """Returns why the next shard is stored in full; "" if it need not be."""
        if last is None and not self._has_begun:
            return "no step was saved before"
        if last is None or not last.handle.done() or last.handle.failure() is not None:
            return "the save before failed"
        if self._deltas + 1 >= self._full_every:
            return "a full one was due"
        if last.shard.pieces != pieces or nbytes != self.nbytes:
            return "its tensors or their division differ from the step before"
        share = last.shard.file_nbytes / last.shard.nbytes
        if self._base is not None and share > _SHARE_MAX:
            return f"the last difference took {share:.0%} of a full one"
        return ""

    def delta(self, base_crcs: Callable[[], list[int]]) -> Delta | None:
        """Returns the member of the index for a difference; None if the shard was stored in full.
        `base_crcs` is that of the transfer, which has some if the shard is a difference.
        """
        return None if self._base is None else Delta(self._base.nonce, tuple(base_crcs()))

    def end(self, handle: InnerHandle, index: ShardIndex) -> None:
        """Notes the shard that was written; its handle tells later whether it is committed.

        Raises:
            CheckpointError: the memory has changed since the last step.
        """
        if self._base is not None and not index.is_difference_from(self._base):
            raise CheckpointError(
                f"the copy of the last version in host memory has changed since it was saved, so "
                f"{handle.path!r} is not its difference: publish again; the next version is stored "
                "in full"
            )
        self._last = _Last(handle, index)

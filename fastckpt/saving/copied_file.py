"""A file whose bytes come portion by portion, such as a copy of another file: while one portion is
written, the next is read. It must not know where the bytes come from, nor how the file is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from fastckpt.arguments.options import WriteOptions
from fastckpt.engine.transfer import ImageTransfer
from fastckpt.plan.image import PORTION_BYTES, Image
from fastckpt.saving.image_file import ImageFile, Make
from fastckpt.saving.pacing import Pace
from fastckpt.saving.pipeline import Pipeline
from fastckpt.storage.lustre_layout import Purpose


def write_portions(
    pipeline: Pipeline,
    portions: Iterator[bytearray],
    path: str,
    options: WriteOptions,
    pace: Pace,
    make: Make,
    purpose: Purpose,
) -> None:
    """Makes a file, as ImageFile.make() does, and writes it; returns when it has arrived.

    Args:
        portions: the file's bytes. The memory of a portion may be used again for the next but one.
        path, options: as ImageFile's.
        make, purpose: as ImageFile.make()'s.
        pace: how fast it may be written.

    Raises:
        StorageError: the file could not be written. PeerFailed: another rank failed meanwhile.
        Exception: what `portions` raises.
    """
    with ExitStack() as files, _UnderWay(pace) as moving:
        allowance = pipeline.staging.allowance(2 * PORTION_BYTES)
        file = files.enter_context(
            ImageFile(pipeline, Image.tailless(), path, options, allowance, pace.timeout_s)
        )
        file.make(make, purpose)
        file.begin(0, pace)
        offset = 0
        for portion in portions:
            image = Image.of_bytes(portion)
            transfer = file.transfer_of(image)
            transfer.write_to(file.fd, offset, file.route)
            moving.follow(transfer)
            offset += len(portion)
        moving.follow(None)
        file.end(offset)


class _UnderWay:
    """The portion that is being written. Leaving the context cancels it and waits for its end."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._transfer: ImageTransfer | None = None

    def __enter__(self) -> _UnderWay:
        return self

    def follow(self, transfer: ImageTransfer | None) -> None:
        """Takes note of a portion that has been begun, and waits for the one before, whose memory
        is free after that.
        """
        before, self._transfer = self._transfer, transfer
        if before is not None:
            with before:
                self._pace.wait_one(before)

    def __exit__(self, *_: object) -> None:
        if self._transfer is not None:
            self._transfer.__exit__()
